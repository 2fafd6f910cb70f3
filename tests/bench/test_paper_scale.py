"""`--scale paper` on a folder laid out as ImageNet: the paper's experiment to the number, on pictures of a few bytes.

Numbers are written out as the paper has them (sections 5.1 and 5.2, the captions, "Implementation Details") or, where
its text leaves them open, as in the authors' experiments. None is read from the tables that are being tested.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run
from PIL import Image
from timm.data import ImageNetInfo
from torch import nn

from branchout.bench import runner
from branchout.bench.job import Job
from branchout.data import augment
from branchout.data.datasets import Dataset, resolve
from branchout.data.draw_scenario import draw_scenario
from branchout.method.recipes import PAPER, REFERENCE
from branchout.model import resnet
from branchout.model.checkpoint import load
from branchout.model.heads import CosineHead
from branchout.training.loop import fit, learning_rate
from branchout.training.optimisation import Optimisation, scale_to_dataset

TRAIN, VAL = 2, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 1,000 synsets of ImageNet, two training and two validation pictures of each."""
    root = tmp_path_factory.mktemp("ILSVRC2012")
    rng = np.random.default_rng(0)
    written = 0
    for synset in ImageNetInfo().label_names():
        for part, count in (("train", TRAIN), ("val", VAL)):
            place = root / part / synset
            place.mkdir(parents=True)
            for number in range(count):
                written += 1
                name = f"{synset}_{number}" if part == "train" else f"ILSVRC2012_val_{written:08d}"
                picture = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
                encoded = io.BytesIO()
                picture.resize((40, 32)).save(encoded, "JPEG", quality=50)
                (place / f"{name}.JPEG").write_bytes(encoded.getvalue())
    return root


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Dataset:
    return resolve(str(folder))


@pytest.fixture
def asked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Job]]:
    """The jobs that a command line would run, none of which is."""

    def jobs_of(*words: str) -> list[Job]:
        caught: list[Job] = []

        def catch(jobs: Sequence[Job], **_: Any) -> list[runner.Done]:
            caught.extend(jobs)
            return []

        monkeypatch.setattr(runner, "run_all", catch)
        status, _, complained = run("bench", *words, "--data", folder, "--scale", "paper", "--out", tmp_path)
        assert (status, complained) == (0, "")
        return caught

    return jobs_of


# The plans.

BASE_TRAINING = Optimisation(epochs=90, lr=0.1, batch=256, weight_decay=1e-4, nesterov=False, schedule="thirds")
STAGE_ONE = Optimisation(epochs=30, lr=0.1, batch=256, weight_decay=1e-4, nesterov=False, schedule="thirds")
STAGE_TWO = Optimisation(epochs=10, lr=0.1, batch=256, weight_decay=1e-4, nesterov=False, schedule="constant")

SIZES: dict[str, tuple[tuple[str, ...], str, int | None, int, int, int]] = {
    # table → backbones; scenario, base classes (None: all inanimate ones), novel at each step, overlap, steps
    "disjoint-40": (("resnet10", "resnet18", "resnet50"), "disjoint", 800, 40, 0, 1),
    "multistep": (("resnet10", "resnet18"), "steps", 500, 50, 0, 10),
    "disjoint-200": (("resnet10",), "disjoint", 800, 200, 0, 1),
    "branch-depth": (("resnet10",), "disjoint-domain", None, 40, 0, 1),
    "overlap-style": (("resnet10",), "overlap-style", 800, 40, 5, 1),
    "overlap-full": (("resnet10", "resnet18"), "overlap-full", 800, 40, 0, 1),
    "overlap-random-shuffled": (("resnet10",), "overlap-random-shuffled", 800, 40, 5, 1),
    "overlap-random-clustered": (("resnet10",), "overlap-random-clustered", 800, 40, 5, 1),
    "overlap-domain-shuffled": (("resnet10",), "overlap-domain-shuffled", None, 40, 5, 1),
    "overlap-domain-clustered": (("resnet10",), "overlap-domain-clustered", None, 40, 5, 1),
}


def test_every_plan_is_the_papers(asked: Callable[..., list[Job]]) -> None:
    plans = {(job.table, job.plan.arch): job.plan for job in asked("all")}
    tables = {place: plan for place, plan in plans.items() if not place[0].startswith("base-classes-")}
    assert set(tables) == {(name, arch) for name, (archs, *_) in SIZES.items() for arch in archs}
    for (name, arch), plan in tables.items():
        assert (plan.scenario, plan.base, plan.novel, plan.overlap, plan.steps) == SIZES[name][1:], name
        many = (name, arch) == ("multistep", "resnet18")  # as in PODNet's set-up, which that column follows
        assert (plan.exemplars, plan.total) == (20 if many else 10, None)
        assert plan.fusion_epochs == (5 if many else None)  # None: the recipe's ten
    for plan in plans.values():
        assert (plan.size, plan.width) == (224, None)
        assert plan.pretraining == BASE_TRAINING
        assert plan.network == STAGE_ONE  # the rivals that train a network are given as much as stage I
        assert plan.epochs is None


def test_the_figures_go_from_few_base_classes_to_800(asked: Callable[..., list[Job]]) -> None:
    """Section 4.1 compares |Y_b| = 40, 100, 200 with 800, and frozen features with all of the network fine-tuned."""
    for figure, parts in (("fig-base-classes", {"fc", "stem"}), ("fig-finetune-depth", {"fc", "layer4", "stem"})):
        jobs = asked(figure)
        kept = {job.plan.kept or 800 for job in jobs}
        assert kept == {40, 100, 200, 800}
        assert all((job.plan.scenario, job.plan.base, job.plan.novel) == ("disjoint", 800, 40) for job in jobs)
        assert {job.plan.arch for job in jobs} == {"resnet10"}
        assert {f"alone-{part}" for part in parts} <= {job.method for job in jobs}
    assert {job.table for job in asked("fig-design-space")} == {"disjoint-40"}


def test_one_table_alone_has_all_its_networks(asked: Callable[..., list[Job]]) -> None:
    for name in ("disjoint-40", "multistep", "overlap-full", "disjoint-200"):
        assert tuple(dict.fromkeys(job.plan.arch for job in asked(name))) == SIZES[name][0]
    assert {job.plan.arch for job in asked("disjoint-40", "--arch", "resnet18")} == {"resnet18"}


def test_what_is_drawn_by_chance_is_drawn_three_times(asked: Callable[..., list[Job]]) -> None:
    seeds = {job.method: job.seeds for job in asked("sota")}
    assert seeds["score-fusion-reference"] == seeds["score-fusion-paper"] == (1, 2, 3)


def test_the_recipes_are_the_papers() -> None:
    for recipe in (PAPER, REFERENCE):
        assert recipe.stage_one.optimisation == STAGE_ONE
        assert not recipe.stage_one.replay
        assert recipe.stage_two.optimisation == STAGE_TWO
        assert recipe.stage_two.views == 10  # a fresh one in each epoch
        values = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        assert set(recipe.stage_two.grid) == {(alpha, beta) for alpha in values for beta in values}
        assert recipe.stage_two.when == "always"
    assert (PAPER.stage_two.learned_router, PAPER.stage_two.beta_on_head, PAPER.balanced) == (True, False, "mean")
    reference = REFERENCE.stage_two
    assert (reference.learned_router, reference.beta_on_head, REFERENCE.balanced) == (False, True, "product")
    # With as many images as ImageNet gives, nothing is fitted to few: 40 novel classes of at least 732.
    for optimisation, images in ((BASE_TRAINING, 800 * 732), (STAGE_ONE, 40 * 732), (STAGE_ONE, 40 * 732 // 2)):
        assert scale_to_dataset(optimisation, images) == optimisation


def test_the_rate_falls_to_a_tenth_every_30_epochs_and_every_10(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(optimisation: Optimisation, epochs: Sequence[int]) -> list[float]:
        return [learning_rate(optimisation, epoch / optimisation.epochs) for epoch in epochs]

    assert rates(BASE_TRAINING, [0, 29, 30, 59, 60, 89]) == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert rates(STAGE_ONE, [0, 9, 10, 19, 20, 29]) == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert rates(STAGE_TWO, [0, 5, 9]) == [0.1, 0.1, 0.1]

    layer = nn.Linear(2, 1, bias=False)
    given: dict[str, Any] = {}
    sgd = torch.optim.SGD

    def noting(parameters: Any, **settings: Any) -> torch.optim.SGD:
        given.update(settings)
        return sgd(parameters, **settings)

    monkeypatch.setattr(torch.optim, "SGD", noting)
    once = replace(BASE_TRAINING, epochs=1)
    fit(layer, [*layer.parameters()], lambda _: [torch.ones(2)], 1, lambda x: layer(x).sum(), once,
        device=torch.device("cpu"))  # fmt: skip
    assert (given["lr"], given["momentum"], given["weight_decay"], given["nesterov"]) == (0.1, 0.9, 1e-4, False)


@pytest.mark.parametrize(("arch", "millions", "with_branch"), [("resnet10", 4.9, 8.6), ("resnet18", 11.2, 19.6)])
def test_the_backbones_have_the_papers_sizes(arch: str, millions: float, with_branch: float) -> None:
    """Table 1's column "# of params", without heads."""
    network = resnet.build(arch, stem="large")
    count = sum(parameter.numel() for parameter in network.parameters())
    branch = sum(parameter.numel() for name, parameter in network.named_parameters() if "layer4" in name)
    assert round(count / 1e6, 1) == millions
    assert round((count + branch) / 1e6, 1) == with_branch


def test_pictures_are_seen_as_in_the_paper() -> None:
    whole = augment.Augmentation((0.08, 1.0), True, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.2)
    assert augment.for_kind("photo", 224) == augment.for_kind("photo", 224, few=True) == whole
    head = CosineHead(8, 3)
    assert head(7 * head.weight).diagonal().tolist() == pytest.approx([16.0] * 3, rel=1e-5)  # 16·cos, and no bias


# What is drawn from the folder.


def test_the_folder_is_recognised_with_domains_and_siblings(dataset: Dataset) -> None:
    assert dataset.name == "imagenet-1k"
    assert (len(dataset.train.classes), len(dataset.train), len(dataset.val)) == (1000, 1000 * TRAIN, 1000 * VAL)
    assert list(dataset.domains.values()).count("animate") == 398
    assert dataset.base_domain == "inanimate"
    # The paper's own examples; a cardigan is something to wear as well.
    assert ("corgi", "Pembroke", "Cardigan (n02113186)") in dataset.siblings
    assert ("guitar", "acoustic guitar", "electric guitar") in dataset.siblings


@pytest.mark.parametrize("name", SIZES)
def test_what_is_drawn_has_the_papers_sizes(name: str, dataset: Dataset) -> None:
    _, scenario, base, novel, overlap, steps = SIZES[name]
    rows = np.random.default_rng(1).normal(size=(len(dataset.train), 3))
    clustered = scenario in ("overlap-random-clustered", "overlap-domain-clustered", "overlap-full")
    drawn = draw_scenario(
        scenario, dataset, base=base, novel=novel, overlap=overlap, steps=steps, seed=1,
        features=rows if clustered else None,
    )  # fmt: skip
    first, *later = drawn.branches
    assert len(first) == (base or 602)
    assert [len(names) for names in later] == [novel] * steps
    shared = set(first) & {name for names in later for name in names}
    assert len(shared) == (novel if scenario == "overlap-full" else overlap)
    assert len({name for names in later for name in names}) == novel * steps
    if "domain" in scenario:
        assert all(dataset.domains[name] == "inanimate" for name in first)
        assert [dataset.domains[name] for name in later[0]].count("animate") == novel - overlap
    train = drawn.train(dataset)
    given = [int((train.origin == origin).sum()) for origin in range(steps + 1)]
    if scenario == "overlap-style":  # either side of a merged pair has one of the two classes, whole
        assert len(drawn.merged) == 10
        assert given == [800 * TRAIN, 40 * TRAIN]
    elif overlap or scenario == "overlap-full":  # half of every class on its side, the other half unused
        assert given == [len(first) * TRAIN // 2, novel * TRAIN // 2]
    else:
        assert given == [len(first) * TRAIN] + [novel * TRAIN] * steps


# The command, from the folder to the rows. Only epochs, width and size are less than the paper's.

LESS = (
    "--scale",
    "paper",
    "--arch",
    "resnet10",
    "--epochs",
    "1",
    "--branch-epochs",
    "1",
    "--width",
    "8",
    "--exemplars",
    "1",
    "--seeds",
    "1",
)


def rows_of(out: Path, table: str, method: str) -> list[dict[str, Any]]:
    table += "-exemplars1"  # of a number of exemplars that is not the table's own
    place = out / "imagenet-1k" / table / "resnet10"
    rows = [json.loads((place / f"{method}-{point}.json").read_text()) for point in ("all", "balanced", "avg")]
    for row in rows:
        assert (row["dataset"], row["table"], row["arch"]) == ("imagenet-1k", table, "resnet10")
        assert 0 <= row["metrics"]["all"] <= 100
        trained = row["settings"]["pretraining"]
        assert (trained["lr"], trained["batch"], trained["weight_decay"]) == (0.1, 256, 1e-4)
    return rows


def test_disjoint_classes_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    words = ("bench", "disjoint-40", "--data", folder, *LESS, "--size", "32", "--method", "score-fusion-reference")
    status, told, complained = run(*words, "--out", tmp_path)
    assert (status, complained) == (0, "")
    assert "disjoint-40-exemplars1 on imagenet-1k, resnet10: 800 + 40" in told
    for row in rows_of(tmp_path, "disjoint-40", "score-fusion-reference"):
        assert (row["base_classes"], row["novel_classes"], row["overlap_classes"], row["steps"]) == (800, 40, 0, 1)
        assert len(row["curve"]) == 36  # every point of the grid


@pytest.mark.parametrize(
    ("table", "base", "size"),
    [("overlap-style", 800, 32), ("overlap-domain-shuffled", 602, 136)],  # the second is too large to be kept decoded
)
def test_overlapping_classes_from_end_to_end(
    table: str, base: int, size: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "cache"))
    words = ("bench", table, "--data", folder, *LESS, "--size", str(size), "--method", "score-fusion-branchout")
    status, _, complained = run(*words, "--out", tmp_path / "rows")
    assert (status, complained) == (0, "")
    for row in rows_of(tmp_path / "rows", table, "score-fusion-branchout"):
        assert (row["base_classes"], row["novel_classes"], row["overlap_classes"], row["steps"]) == (base, 40, 5, 1)
        assert row["metrics"]["overlap"] is not None
    (kept,) = (tmp_path / "cache" / "bench").glob("*/branchout.json")
    base_model = load(kept.parent).classifier
    assert base_model.arch["stem"] == ("large" if size > 96 else "small")
    assert len(base_model.space.classes) == base


def test_ten_steps_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    words = ("bench", "multistep", "--data", folder, *LESS, "--size", "32", "--method", "score-fusion-branchout")
    status, _, complained = run(*words, "--out", tmp_path)
    assert (status, complained) == (0, "")
    for row in rows_of(tmp_path, "multistep", "score-fusion-branchout"):
        assert (row["base_classes"], row["novel_classes"], row["steps"]) == (500, 500, 10)
        assert [len(steps) for steps in row["per_step"]] == [10]
        assert row["metrics"]["incremental"] is not None
        assert row["metrics"]["avg_steps"] is not None
