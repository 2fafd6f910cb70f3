"""A base model that is there already: the shipped one in the glyph tables, and anyone's own."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from helpers import BASE, CPU, NEW, same

from branchout import api
from branchout.bench import experiment as module
from branchout.bench.base_model import MADE_FOR, open_base
from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.plan import Plan
from branchout.bench.runner import run
from branchout.bench.tables import experiments_of, plan_for, table_named
from branchout.data.datasets import Dataset
from branchout.data.draw_scenario import draw_scenario
from branchout.data.glyphs import SANS, glyphs
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.training.optimisation import Optimisation


@cache
def characters() -> Dataset:
    """All of them, which costs nothing until one is drawn."""
    return glyphs()


# The shipped one.


@pytest.mark.parametrize(("table", "new"), [("disjoint-40", 40), ("disjoint-200", 200), ("overlap-style", 40)])
def test_glyph_tables_start_from_the_images_that_the_shipped_base_was_trained_on(table: str, new: int) -> None:
    plan = plan_for(table, characters())
    assert plan.model == "glyphs"
    scenario = Experiment(plan, characters(), device=CPU).scenario
    shipped = api.load("glyphs")
    assert scenario.branches[0] == shipped.classes
    assert [len(names) for names in scenario.branches] == [800, new]
    train = scenario.train(characters())
    seen = train.select(train.origin == 0)
    assert len(seen) == shipped.saved.history[0]["images"]
    less = [name for name, count in seen.counts().items() if count < 48]
    assert len(less) == 5
    assert set(seen.of_classes(less).attributes["style"].tolist()) <= set(SANS)
    assert set(scenario.space.overlap) == (set(less) if table == "overlap-style" else set())


def test_a_change_of_style_has_the_split_that_the_shipped_base_was_made_for() -> None:
    drawn = draw_scenario("overlap-style", characters(), base=800, novel=40, overlap=5, seed=0)
    assert Experiment(plan_for("overlap-style", characters()), characters(), device=CPU).scenario == drawn
    assert plan_for("overlap-style", characters(), split=2).model is None  # another split has a base of its own


def test_another_split_draws_other_new_classes_for_the_same_base() -> None:
    one, other = (
        Experiment(plan_for("disjoint-40", characters(), split=split), characters(), device=CPU).scenario
        for split in (1, 2)
    )
    assert one.branches[0] == other.branches[0]
    assert set(one.branches[1]) != set(other.branches[1])


@pytest.mark.parametrize(
    "asked", [{"arch": "resnet18"}, {"width": 8}, {"size": 24}, {"epochs": 3}, {"schedule": "paper"}]
)
def test_a_base_that_is_asked_for_otherwise_is_trained(asked: dict[str, int | str]) -> None:
    assert plan_for("disjoint-40", characters(), **asked).model is None  # type: ignore[arg-type]
    assert plan_for("disjoint-40", characters(), exemplars=5, total=None, split=3).model == "glyphs"


def test_data_without_its_characters_does_not_get_the_shipped_base(train: Samples, val: Samples) -> None:
    few = Dataset("glyphs", train, val, kind="glyph")
    assert plan_for("disjoint-40", few).model is None
    with pytest.raises(BranchoutError, match="of the base's 800 classes have no training images in 'glyphs'"):
        open_base("glyphs").scenario(Plan("disjoint", 800, 3), few)
    without_styles = replace(characters(), style_sides=None)
    with pytest.raises(BranchoutError, match="trained on other images than those of 'glyphs'"):
        open_base("glyphs").scenario(Plan("disjoint", 800, 3), without_styles)


def test_fewer_base_classes_are_some_of_the_shipped_ones_and_have_the_same_new_ones() -> None:
    plans = experiments_of(table_named("fig-finetune-depth"), characters())
    drawn = [Experiment(plan, characters(), device=CPU).scenario.branches for plan in plans.values()]
    assert [len(base) for base, _ in drawn] == [40, 100, 200, 800]
    bases = [set(base) for base, _ in drawn]
    assert bases[0] < bases[1] < bases[2] < bases[3] == set(api.load("glyphs").classes)
    assert len({new for _, new in drawn}) == 1


def test_what_the_shipped_base_was_made_for_is_the_demos_scenario() -> None:
    from branchout import demo

    assert (MADE_FOR["base"], MADE_FOR["novel"], MADE_FOR["overlap"]) == (demo.BASE, demo.NOVEL, demo.OVERLAP)


# Anyone's own.


@pytest.fixture
def dataset(train: Samples, val: Samples) -> Dataset:
    return Dataset("few", train, val, kind="glyph")


def plan_from(model: api.Model, **changes: object) -> Plan:
    short = Optimisation(epochs=1, lr=0.03, batch=16)
    plan = Plan("disjoint", None, 3, exemplars=4, network=short, epochs=1, **changes)  # type: ignore[arg-type]
    return open_base(str(model.folder)).start(plan)


def test_a_saved_model_is_the_base_as_it_is(base: api.Model, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pretrain", lambda *a, **k: pytest.fail("something was trained"))
    plan = plan_from(base)
    assert (plan.base, plan.arch, plan.width, plan.size) == (8, "resnet10", 8, 32)
    assert plan.pretraining == Optimisation(epochs=30, lr=0.03, batch=32, nesterov=True, schedule="cosine")
    experiment = Experiment(plan, dataset, device=CPU)
    assert same(experiment.base.state_dict(), base.classifier.state_dict())
    assert set(experiment.training_images(0).counts().values()) == {20}  # all training images of its classes
    assert not set(experiment.scenario.branches[1]) & set(BASE)
    test = experiment.scenario.test(dataset, 0)
    assert experiment.before.test.all == base.evaluate(test).after.all


def test_with_fewer_classes_one_is_trained_on_them(base: api.Model, dataset: Dataset) -> None:
    plan = replace(plan_from(base), kept=5, pretraining=Optimisation(epochs=1, lr=0.03, batch=32))
    experiment = Experiment(plan, dataset, device=CPU)
    assert len(experiment.base.space.classes) == 5
    assert set(experiment.base.space.classes) < set(BASE)


def test_a_row_says_what_it_started_from_and_is_not_taken_for_another(
    base: api.Model, dataset: Dataset, tmp_path: Path
) -> None:
    plan = plan_from(base)
    job = Job("few", "few", "mine", plan, "ncm", (1,), tmp_path)
    run(job, {("few", plan): Experiment(plan, dataset, device=CPU)})
    row = json.loads(job.files()["plain"].read_text())
    assert row["base_classes"] == 8
    assert row["settings"]["model"] == base.folder.name  # type: ignore[union-attr]
    assert row["settings"]["weights"] == plan.weights
    moved = shutil.copytree(base.folder, tmp_path / "moved")  # type: ignore[arg-type]
    elsewhere = replace(job, plan=replace(plan, model=str(moved)))
    assert elsewhere.missing() == []
    with pytest.raises(BranchoutError, match=f"weights = {plan.weights}, .*has None"):
        replace(job, plan=replace(plan, model=None, weights=None)).missing()


def test_rows_from_before_there_were_saved_bases_are_still_rows(
    base: api.Model, dataset: Dataset, tmp_path: Path
) -> None:
    given = plan_from(base)
    trained = replace(given, model=None, weights=None, pretraining=Optimisation(epochs=1, lr=0.03, batch=32))
    job = Job("few", "few", "mine", trained, "ncm", (1,), tmp_path)
    run(job, {("few", trained): Experiment(trained, dataset, device=CPU)})
    for path in job.files().values():
        row = json.loads(path.read_text())
        del row["settings"]["model"], row["settings"]["weights"]
        path.write_text(json.dumps(row))
    assert job.missing() == []
    with pytest.raises(BranchoutError, match="was measured with weights = None"):
        replace(job, plan=replace(trained, model=given.model, weights=given.weights)).missing()


def test_a_model_that_was_replaced_meanwhile_is_noticed(base: api.Model, dataset: Dataset) -> None:
    with pytest.raises(BranchoutError, match="was replaced since this experiment was planned"):
        Experiment(replace(plan_from(base), weights="other"), dataset, device=CPU)


def test_an_extended_model_is_no_base(extended: api.Model) -> None:
    assert len(extended.classes) == len(BASE) + len(NEW)
    with pytest.raises(BranchoutError, match=r"already extended \(1 steps\).* give the model it was extended from"):
        open_base(str(extended.folder))
