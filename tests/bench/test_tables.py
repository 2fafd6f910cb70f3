"""Tables are data: every name in them means something, and sizes fit the dataset at hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.methods import method_named, methods
from branchout.bench.plan import Plan
from branchout.bench.request import EXEMPLARS, Request
from branchout.bench.tables import (
    experiments_of,
    fitted_to,
    networks_of,
    plan_for,
    scale_of,
    scheduled,
    table_named,
    tables,
)
from branchout.data.datasets import Dataset
from branchout.data.glyphs import glyphs
from branchout.data.samples import ArrayPixels, Samples, digest
from branchout.data.scenarios import CLUSTERED, NAMES
from branchout.errors import BranchoutError
from branchout.training.optimisation import settings_dict
from branchout.training.pretrain import TRANSFORMER

RESULTS = Path(__file__).parents[2] / "results"
ALL = (
    *("sota", "multistep", "disjoint-40", "disjoint-200", "branch-depth", "overlap-style", "overlap-full"),
    *("overlap-random-shuffled", "overlap-random-clustered", "overlap-domain-shuffled", "overlap-domain-clustered"),
)


@pytest.fixture(scope="module")
def dataset(train: Samples, val: Samples) -> Dataset:
    return Dataset("glyphs", train, val, kind="glyph")


def test_every_table_of_the_paper_is_there() -> None:
    assert tuple(sorted(tables())) == tuple(sorted(ALL))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", ["paper", "tiny-imagenet-200", "glyphs"])
def test_a_table_names_known_methods_and_a_known_scenario_at_every_scale(
    name: str, scale: str, dataset: Dataset
) -> None:
    table = table_named(name)
    plan = plan_for(table.experiment, dataset, scale)
    assert plan.scenario in NAMES
    known = methods()
    assert not set(table.methods) - set(known)
    for arch in table.archs:
        assert not set(table.methods_for(arch)) - set(known)
        # Our recipe, and the honest comparison.
        assert {"score-fusion-branchout", "joint"} <= set(table.methods_for(arch))


def test_sizes_follow_the_dataset(dataset: Dataset, train: Samples, val: Samples) -> None:
    assert scale_of(dataset) == "glyphs"
    assert scale_of(Dataset("tiny-imagenet-200", train, val)) == "tiny-imagenet-200"
    assert scale_of(Dataset("imagenet-1k", train, val)) == "paper"
    assert scale_of(Dataset("imagenette", train, val)) == "fitted"
    assert scale_of(Dataset("tiny_products", train, val)) == "fitted"  # not every small thing is that one
    tiny = plan_for("multistep", Dataset("tiny-imagenet-200", train, val))
    assert (tiny.base, tiny.novel, tiny.steps) == (100, 10, 10)
    large = plan_for("disjoint-40", Dataset("tiny-imagenet-200", train, val), arch="resnet50")
    assert (large.pretraining.epochs, large.network.epochs) == (20, 30)
    assert large == plan_for(
        "disjoint-40", Dataset("tiny-imagenet-200", train, val), arch="resnet50", schedule="fast"
    )  # its default by name
    assert plan_for("disjoint-40", Dataset("imagenet-1k", train, val), arch="resnet50").pretraining.epochs == 90
    full = plan_for("disjoint-40", Dataset("imagenet-1k", train, val), arch="resnet18", exemplars=None)
    assert (full.base, full.novel, full.size, full.arch) == (800, 40, 224, "resnet18")
    assert (full.pretraining.epochs, full.pretraining.lr, full.exemplars) == (90, 0.1, 10)
    larger = plan_for("multistep", Dataset("imagenet-1k", train, val), arch="resnet18")
    assert (larger.exemplars, larger.fusion_epochs) == (20, 5)  # as in the paper's run with ResNet18
    with pytest.raises(BranchoutError, match="no scale is called 'huge'; known are: paper, "):
        plan_for("disjoint-40", dataset, "huge")


@pytest.mark.parametrize("known", [4, 12, 37, 102, 200])
def test_sizes_fit_whatever_classes_there_are(known: int) -> None:
    names = [str(n) for n in range(known)]
    train = Samples.build(ArrayPixels(np.zeros((known, 64, 64, 3), np.uint8)), names, names)
    dataset = Dataset("mine", train, train)
    for name in tables():
        if table_named(name).experiment != name:
            continue
        plan = plan_for(name, dataset)
        assert plan.novel >= 1
        assert 0 <= plan.overlap < plan.novel
        assert (plan.base or 1) >= 1
        assert (plan.base or 0) + plan.steps * plan.novel <= known
        if known == 200:
            like = plan_for(name, Dataset("tiny-imagenet-200", train, train))
            assert plan == like
    counts = [plan.kept or plan.base for plan in experiments_of(table_named("fig-base-classes"), dataset).values()]
    assert counts[-1] == plan_for("disjoint-40", dataset).base
    assert all(count is not None and 1 <= count < known for count in counts)
    assert counts == sorted(set(counts))


def test_schedules_have_names(dataset: Dataset) -> None:
    plan = fitted_to(Plan("disjoint", 5, 2), dataset)
    assert scheduled(plan, None, None) == plan
    long = scheduled(plan, "published", None)
    assert long.pretraining == long.network
    assert (long.network.epochs, long.network.schedule) == (170, "der")
    assert (plan.augmentation, long.augmentation) == (None, "padded")
    assert (plan.memory, long.memory) == ("random", "herding")
    assert long.last_relu
    assert not scheduled(replace(plan, arch="resnet32"), "published", None).last_relu
    assert scheduled(replace(plan, arch="resnet32"), "paper", None).last_relu
    short = scheduled(plan, "paper", 3)
    assert (short.pretraining.lr, short.pretraining.epochs, short.network.epochs) == (0.1, 3, 3)
    assert (short.epochs, short.fusion_epochs) == (None, None)  # our own recipe stays as it is
    quick = scheduled(plan, None, None, 2)
    assert (quick.epochs, quick.fusion_epochs, quick.network) == (2, 2, plan.network)
    assert long.faithful
    assert not short.faithful
    with pytest.raises(BranchoutError, match="no schedule is called 'slow'; known are: fast, paper, published"):
        scheduled(plan, "slow", None)


def test_a_dataset_may_have_fewer_networks_than_a_table(dataset: Dataset, train: Samples, val: Samples) -> None:
    for name in ("sota", "disjoint-40"):
        assert networks_of(table_named(name), dataset.name) == ("resnet10",)
    assert networks_of(table_named("sota"), "imagenet-1k") == ("resnet10", "resnet18")


def test_the_figures_have_the_papers_numbers_of_base_classes(dataset: Dataset) -> None:
    plans = experiments_of(table_named("fig-base-classes"), dataset)
    assert {name: plan.kept for name, plan in plans.items()} == {
        "base-classes-40": 40,
        "base-classes-100": 100,
        "base-classes-200": 200,
        "base-classes-800": None,
    }


def test_few_characters_are_learned_for_longer(dataset: Dataset) -> None:
    def epochs(**asked: int) -> list[int]:
        plans = experiments_of(table_named("fig-base-classes"), dataset, **asked)
        return [plan.pretraining.epochs for plan in plans.values()]

    assert epochs() == [60, 48, 24, 12]
    assert epochs(epochs=2) == [2, 2, 2, 2]
    assert [fitted_to(Plan("steps", base, 5), dataset).pretraining.epochs for base in (8, 500, None)] == [60, 12, 12]


def test_names_that_mean_nothing_are_answered_with_near_ones() -> None:
    assert method_named("branchout").name == "score-fusion-branchout"
    with pytest.raises(BranchoutError, match="no method is called 'icral'; did you mean icarl"):
        method_named("icral")
    with pytest.raises(BranchoutError, match="no table is called 'sotta'; did you mean sota"):
        table_named("sotta")


def test_networks_are_trained_for_one_seed_and_features_for_all(dataset: Dataset, tmp_path: Path) -> None:
    plan = fitted_to(Plan("disjoint", 8, 3), dataset)
    request = Request("glyphs", tmp_path)
    jobs = request.jobs_of(dataset, "mine", plan, ["finetune", "featcat-rt", "branchout"])
    assert [job.seeds for job in jobs] == [(1,), (1, 2, 3), (1, 2, 3)]
    assert [job.method for job in jobs] == ["finetune", "featcat-rt", "score-fusion-branchout"]
    many = replace(plan, scenario="steps", steps=2)
    jobs = request.jobs_of(dataset, "mine", many, ["featcat-rt", "reference", "branchout"])
    assert [job.seeds for job in jobs] == [(1, 2, 3), (1, 2, 3), (1,)]  # ours trains a branch for each seed and step


def test_rows_lie_where_the_design_says(dataset: Dataset, tmp_path: Path) -> None:
    plan = fitted_to(Plan("disjoint", 8, 3), dataset)
    job = Job("glyphs", "glyphs", "disjoint-40", plan, "score-fusion-reference", (1,), tmp_path)
    assert job.files()["avg"] == tmp_path / "glyphs/disjoint-40/resnet10/score-fusion-reference-avg.json"
    assert job.missing() == ["all", "balanced", "avg"]


# The rows of this repository.


def plans_of(dataset: Dataset, **changes: int | str) -> dict[str, Plan]:
    """The plan that today's tables have for each experiment."""
    return {
        name: plan
        for table in (*tables().values(), table_named("fig-base-classes"))
        if changes["arch"] in networks_of(table, dataset.name)
        for name, plan in experiments_of(table, dataset, **changes).items()
    }


@pytest.mark.parametrize("name", ["tiny-imagenet-200", "glyphs"])
def test_rows_that_are_kept_here_are_those_that_would_be_made_today(name: str, train: Samples, val: Samples) -> None:
    """`branchout bench` would take every one for what it asks for, or make it again where it is marked as outdated."""
    dataset = glyphs() if name == "glyphs" else Dataset(name, train, val)
    size = 32 if name == "glyphs" else 64
    plans: dict[tuple[int, str], dict[str, Plan]] = {}
    rows = 0
    for folder in sorted({path.parent for path in (RESULTS / name).glob("*/*/*.json")}):
        table, _, number = folder.parent.name.partition("-split")
        experiment, _, exemplars = table.partition(EXEMPLARS)
        split = int(number or 1)
        if (split, folder.name) not in plans:
            plans[split, folder.name] = plans_of(dataset, size=size, arch=folder.name, split=split)
        plan = plans[split, folder.name][experiment]
        plan = replace(plan, exemplars=int(exemplars)) if exemplars else plan
        for method in methods():
            own = Job(name, name, table, plan, method, (), RESULTS).files()
            kept = [json.loads(path.read_text(encoding="utf-8")) for path in own.values() if path.exists()]
            for row in kept:
                seeds, images = tuple(row.get("asked_seeds", row["seeds"])), row.get("images") or ""
                Job(name, name, table, plan, method, seeds, RESULTS, images=images).missing()
            rows += len(kept)
        if plan.scenario in CLUSTERED:
            assert (
                Experiment(plan, dataset, scenario_file=folder.parent / "scenario.json").scenario.name == plan.scenario
            )
    assert rows == len(list((RESULTS / name).glob("*/*/*.json"))) > 100


def test_a_row_tells_whether_deltas_were_learned_beside_the_recipe() -> None:
    plain, fused = (method_named(f"score-fusion{how}-branchout").settings() for how in ("", "-deltas"))
    assert fused == {**plain, "fuse": True}


# Vision transformers, which came later than most rows.


def test_the_transformer_is_run_beside_the_papers_networks_on_small_photographs_alone() -> None:
    table = table_named("disjoint-40")
    assert networks_of(table, "tiny-imagenet-200") == ("resnet10", "resnet18", "resnet50", "vit_tiny")
    papers = ("resnet10", "resnet18", "resnet50")
    assert (
        table.archs == networks_of(table, "imagenet-1k") == networks_of(table, "tiny-imagenet-200", "paper") == papers
    )
    assert networks_of(table, "glyphs") == ("resnet10",)
    assert {"aper", "aper-all", "ncm", "joint"} <= set(table.methods_for("vit_tiny"))
    assert not {"aper", "aper-all"} & set(table.methods_for("resnet10"))
    for name, other in tables().items():
        assert "vit_tiny" not in networks_of(other, "tiny-imagenet-200") or name == "disjoint-40"


def test_a_transformer_has_a_schedule_of_its_own(dataset: Dataset, train: Samples, val: Samples) -> None:
    tiny = Dataset("tiny-imagenet-200", train, val)
    plan = plan_for("disjoint-40", tiny, arch="vit_tiny", size=64)
    assert plan.pretraining == TRANSFORMER
    assert (plan.base, plan.novel, plan.arch, plan.size, plan.width) == (180, 20, "vit_tiny", 64, None)
    assert (plan.network.optimiser, plan.network.epochs) == ("sgd", 30)  # steps are learned as with any base
    assert plan_for("disjoint-40", tiny, arch="vit_tiny", size=64, schedule="fast") == plan
    assert plan_for("disjoint-40", tiny, "paper", arch="vit_tiny").pretraining == TRANSFORMER
    assert plan_for("disjoint-40", dataset, arch="vit_tiny").width is None  # glyphs' 16 is a ResNet's
    assert plan_for("disjoint-40", dataset, arch="vit_tiny").model is None
    assert plan_for("disjoint-40", tiny, arch="vit_tiny", epochs=2).pretraining == replace(TRANSFORMER, epochs=2)
    for schedule in ("paper", "published"):
        with pytest.raises(BranchoutError, match=f"The schedule '{schedule}' .* SGD"):
            plan_for("disjoint-40", tiny, arch="vit_tiny", schedule=schedule)


def test_other_schedules_leave_the_transformer_out() -> None:
    table = tables()["disjoint-40"]
    assert "vit_tiny" in networks_of(table, "tiny-imagenet-200", schedule="fast")
    for schedule in ("paper", "published"):
        assert networks_of(table, "tiny-imagenet-200", schedule=schedule) == ("resnet10", "resnet18", "resnet50")


@pytest.mark.parametrize("scenario", CLUSTERED)
def test_a_transformer_takes_no_part_where_a_resnet_cuts(scenario: str, dataset: Dataset) -> None:
    with pytest.raises(BranchoutError, match=f"{scenario} is clustered with a ResNet10"):
        plan_for(scenario, dataset, arch="vit_tiny")


def test_a_transformer_is_told_its_sizes_before_anything_is_read(dataset: Dataset) -> None:
    with pytest.raises(BranchoutError, match="--size 32"):
        plan_for("disjoint-40", dataset, arch="vit_tiny", size=30)


def test_a_transformer_keeps_its_epochs_whatever_the_number_of_base_classes(dataset: Dataset) -> None:
    plans = experiments_of(table_named("fig-base-classes"), dataset, arch="vit_tiny")
    assert {plan.pretraining for plan in plans.values()} == {TRANSFORMER}


def test_settings_of_resnets_are_those_from_before_there_were_transformers(train: Samples, val: Samples) -> None:
    tiny = Dataset("tiny-imagenet-200", train, val)
    settings = Experiment(plan_for("disjoint-40", tiny, size=64), tiny)._training()
    assert settings["optimisation"] == {
        "epochs": 40,
        "lr": 0.4,
        "batch": 512,
        "weight_decay": 0.0005,
        "nesterov": True,
        "schedule": "cosine",
    }
    assert digest(repr(sorted(settings.items()))) == "1d2fe5c7e81feae8a62d807491dcdd3d"
    other = Experiment(plan_for("disjoint-40", tiny, arch="vit_tiny", size=64), tiny)._training()
    assert other["optimisation"]["optimiser"] == "adamw"


def test_a_row_records_what_rows_have_always_recorded(train: Samples, val: Samples) -> None:
    """To the byte: the settings of a row that is kept here, from the plan that would make it today."""
    kept = RESULTS / "tiny-imagenet-200/disjoint-40/resnet10/score-fusion-branchout-all.json"
    plan = plan_for("disjoint-40", Dataset("tiny-imagenet-200", train, val), size=64, arch="resnet10")
    today = {**settings_dict(plan), **method_named("score-fusion-branchout").settings()}
    recorded = json.loads(kept.read_text(encoding="utf-8"))["settings"]
    assert json.dumps(today, indent=1) == json.dumps(recorded, indent=1)


def test_a_row_that_names_no_optimiser_was_made_by_descent_with_momentum(tmp_path: Path, dataset: Dataset) -> None:
    plan = fitted_to(Plan("disjoint", 8, 3), dataset)
    job = Job("glyphs", "glyphs", "mine", plan, "ncm", (1,), tmp_path)
    row = {"settings": {**settings_dict(plan), **method_named("ncm").settings()}, "seeds": [1], "metrics": {}}
    assert "optimiser" not in json.dumps(row)
    for path in job.files().values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row))
    assert job.missing() == []
    other = replace(job, plan=replace(plan, pretraining=replace(plan.pretraining, optimiser="adamw")))
    with pytest.raises(BranchoutError, match=r"measured with pretraining\.optimiser = sgd, and this run has adamw"):
        other.missing()
    row["settings"] |= settings_dict(other.plan)
    for path in job.files().values():
        path.write_text(json.dumps(row))
    assert other.missing() == []
    with pytest.raises(BranchoutError, match=r"measured with pretraining\.optimiser = adamw, and this run has sgd"):
        job.missing()


def test_a_table_with_other_exemplars_has_rows_of_its_own(dataset: Dataset, tmp_path: Path) -> None:
    found = {}
    for exemplars in (None, 0, 5, 10):
        request = Request(
            "letters", tmp_path, table="disjoint-40", methods=("bic",), arch="resnet10", exemplars=exemplars
        )
        (job,) = request.jobs(dataset)
        found[exemplars] = (job.table, job.plan.exemplars)
    assert found == {
        None: ("disjoint-40", 10),
        0: ("disjoint-40-exemplars0", 0),
        5: ("disjoint-40-exemplars5", 5),
        10: ("disjoint-40", 10),
    }
    job = Request("letters", tmp_path, table="disjoint-40", methods=("bic",), arch="resnet10", exemplars=5).jobs(
        dataset
    )[0]
    for path in job.files().values():
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"table": job.table, "arch": "resnet10", "point": path.stem.removeprefix("bic-"), "settings": {}}
        path.write_text(json.dumps({**row, "seeds": [1], "metrics": {}, "outdated": "why"}))
    (again,) = Request("letters", tmp_path, stale=True).jobs(dataset)
    assert (again.table, again.plan) == (job.table, job.plan)


@pytest.mark.parametrize("total", [None, 40])
def test_outdated_rows_keep_their_own_number_of_exemplars(dataset: Dataset, tmp_path: Path, total: int | None) -> None:
    made = Request("letters", tmp_path, table="disjoint-40", methods=("bic",), arch="resnet10", memory_total=total)
    (job,) = made.jobs(dataset)
    for path in job.files().values():
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"table": job.table, "arch": "resnet10", "point": path.stem.removeprefix("bic-")}
        row["settings"] = {"total": total} if total else {}  # older rows do not name it
        path.write_text(json.dumps({**row, "seeds": [1], "metrics": {}, "outdated": "why"}))
    for option in ("exemplars", "memory_total"):
        asked = replace(Request("letters", tmp_path, stale=True), **{option: 5})
        assert [again.plan for again in asked.jobs(dataset)] == [job.plan]
        with pytest.raises(BranchoutError, match=f"leave --{option.replace('_', '-')} out"):
            asked.check()
