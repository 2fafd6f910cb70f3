"""Operating points: the same as `branchout tune` picks, each with its own head, saved in one move."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from browsing import with_fixed_dial
from helpers import BASE, NEW, untrained

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.serve.operating_points import OperatingPoints


@pytest.fixture
def model(extended: api.Model, val: Samples, tmp_path: Path) -> api.Model:
    """A copy that may be written to."""
    return with_fixed_dial(extended, val.of_classes(extended.classes), tmp_path / "v2")


def grid_model() -> api.Model:
    classifier = untrained(BASE, NEW)
    deltas = [[torch.full((classifier.backbone.features, n), float(p)) for n in (8, 3)] for p in (1, 2)]
    frontier = {
        "kind": "grid",
        "settings": [[0.5, 1.0], [2.0, 4.0]],
        "figures": {
            "all": [0.9, 0.8],
            "base": [0.9, 0.7],
            "novel": [0.5, 0.9],
            "overlap": [None, None],
            "avg": [0.7, 0.8],
        },
        "images": 10,
        "balanced_by": "mean",
        "measured": "dev",
    }
    kept = SavedModel(classifier, (StepPoints(frontier, deltas, 0, "all"),), ({"what": "made"},))
    return api.Model(kept, None, torch.device("cpu"))


@pytest.mark.parametrize("goal", ["all", "avg", "novel", "balanced", "novel>=0.1"])
def test_a_goal_is_the_point_that_tune_picks(goal: str, model: api.Model) -> None:
    points = OperatingPoints(model)
    point = points.for_goal(goal)
    figures = model.tune(goal)
    assert torch.equal(point.head.bias, model.classifier.fused.bias)
    assert point.about is not None
    assert point.about["point"] == model.saved.step_points[-1].point
    assert point.about["accuracies"] == figures
    assert point.about["goal"] == goal


def test_it_starts_where_the_model_was_saved(model: api.Model) -> None:
    current = OperatingPoints(model).current
    assert torch.equal(current.head.bias, model.classifier.fused.bias)
    assert current.about is not None
    assert current.about["saved"]
    assert current.about["b"] == pytest.approx(current.head.bias[1].item(), abs=1e-5)


def test_making_a_point_leaves_the_one_in_force_alone(model: api.Model) -> None:
    points = OperatingPoints(model)
    before = points.current.head.bias.clone()
    other = points.at(7.5)
    assert other.head.bias.tolist() == [0.0, 7.5]
    assert torch.equal(points.current.head.bias, before)
    assert other.head.heads[0] is points.current.head.heads[0]  # no weight is copied


def test_a_b_between_two_points_names_the_nearest(model: api.Model) -> None:
    points = OperatingPoints(model)
    assert points.frontier is not None
    on = float(points.frontier.settings[0, 0])
    about = points.at(on + 1e-4).about
    assert about is not None
    assert about["point"] is None
    assert about["accuracies"] is None
    assert about["nearest"] == {"b": on, "accuracies": points.frontier.at(0)}
    exactly = points.at(on).about
    assert exactly is not None
    assert exactly["point"] == 0
    assert exactly["accuracies"] == points.frontier.at(0)


def test_offsets_of_the_steps_stay_whatever_the_dial_says(model: api.Model) -> None:
    *earlier, last = model.saved.step_points
    model.saved = replace(model.saved, step_points=(*earlier, replace(last, offsets=(0.25,))))
    points = OperatingPoints(model)
    assert points.at(1.5).head.bias.tolist() == [0.0, 1.75]
    assert points.current.head.bias[1].item() == pytest.approx(points.current.about["b"] + 0.25, abs=1e-5)


@pytest.mark.parametrize("b", [math.nan, math.inf, -math.inf, 1e30])
def test_a_b_that_is_no_position_is_refused(b: float, model: api.Model) -> None:
    with pytest.raises(BranchoutError, match="b must be a number between"):
        OperatingPoints(model).at(b)


def test_a_goal_nobody_knows_is_refused(model: api.Model) -> None:
    with pytest.raises(BranchoutError, match="no goal is called 'best'"):
        OperatingPoints(model).for_goal("best")


def test_a_grid_has_goals_and_no_dial() -> None:
    points = OperatingPoints(grid_model())
    with pytest.raises(BranchoutError, match="no dial"):
        points.at(1.0)
    about = points.for_goal("novel").about
    assert about is not None
    assert (about["alpha"], about["beta"], about["point"]) == (2.0, 4.0, 1)
    assert about["accuracies"]["overlap"] is None
    deltas = points.for_goal("novel").head.deltas
    assert deltas[0] is not None
    assert deltas[0].unique().tolist() == [2.0]
    assert points.current.head.deltas[0].unique().tolist() == [1.0]


def test_a_base_has_no_points(base: api.Model) -> None:
    points = OperatingPoints(base)
    assert points.current.about is None
    assert points.before is None
    for ask in (lambda: points.for_goal("all"), lambda: points.at(0.0)):
        with pytest.raises(BranchoutError, match="branchout extend"):
            ask()


def test_saving_is_read_back_and_leaves_nothing_else(model: api.Model) -> None:
    assert model.folder is not None
    points = OperatingPoints(model)
    files = sorted(path.name for path in model.folder.iterdir())
    now = points.current.about["point"]
    other = next(goal for goal in ("novel", "all", "base") if points.for_goal(goal).about["point"] != now)
    chosen = points.for_goal(other)
    assert chosen.about is not None
    assert not chosen.about["saved"]
    saved = points.save(chosen)
    assert saved.about is not None
    assert saved.about["saved"]
    again = api.load(model.folder).saved.step_points[-1]
    assert (again.point, again.goal) == (chosen.about["point"], other)
    assert sorted(path.name for path in model.folder.iterdir()) == files


def test_saved_is_the_choice_that_the_folder_names(model: api.Model) -> None:
    """Another goal that leads to the saved point is not what was saved, and asking for it saves nothing."""
    *earlier, last = model.saved.step_points
    only = model.frontier.select(np.array([last.point]))
    points = replace(last, frontier=only.to_dict(), point=0, goal="balanced")
    *before, event = model.saved.history
    history = (*before, {**event, "measured": None})  # which names points of the frontier before
    model.saved = replace(model.saved, step_points=(*earlier, points), history=history)
    points = OperatingPoints(model)
    told = {goal: points.for_goal(goal).about for goal in ("balanced", "avg", "novel")}
    assert {about["point"] for about in told.values()} == {0}
    assert [goal for goal, about in told.items() if about["saved"]] == ["balanced"]
    assert not points.at(float(only.settings[0, 0])).about["saved"]
    by_number = points.numbered(0).about
    assert (by_number["goal"], by_number["saved"]) == ("balanced", True)
    assert points.save(points.for_goal("avg")).about["saved"]
    assert points.for_goal("avg").about["saved"]
    assert not points.for_goal("balanced").about["saved"]


def test_only_points_of_the_frontier_are_saved(model: api.Model) -> None:
    assert model.folder is not None
    points = OperatingPoints(model)
    before = (model.folder / "branchout.json").read_bytes()
    with pytest.raises(BranchoutError, match="nearest has b="):
        points.save(points.at(float(points.frontier.settings[0, 0]) + 1e-3))
    assert (model.folder / "branchout.json").read_bytes() == before
    points.save(points.at(float(points.frontier.settings[0, 0])))
    assert api.load(model.folder).saved.step_points[-1].point == 0


def test_a_folder_that_holds_another_model_by_now_is_not_written_to(model: api.Model) -> None:
    assert model.folder is not None
    points = OperatingPoints(model)
    manifest = model.folder / "branchout.json"
    about = json.loads(manifest.read_text(encoding="utf-8"))
    about["files"]["base.safetensors"] = "0" * 64
    manifest.write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(BranchoutError, match="another model"):
        points.save(points.for_goal("novel"))
    shutil.rmtree(model.folder)
    with pytest.raises(BranchoutError, match="no saved model"):
        points.save(points.for_goal("novel"))


def test_a_model_without_a_folder_saves_nothing() -> None:
    points = OperatingPoints(grid_model())
    with pytest.raises(BranchoutError, match="no folder"):
        points.save(points.for_goal("novel"))


def test_a_choice_made_outside_is_noticed(model: api.Model) -> None:
    assert model.folder is not None
    points = OperatingPoints(model)
    current = points.current
    assert current.about["saved"]
    outside = api.load(model.folder)
    now = (current.about["point"], current.about["goal"])
    other = next(g for g in ("novel", "all", "avg") if (points.for_goal(g).about["point"], g) != now)
    outside.tune(other)
    assert not current.about["saved"]
    assert points.for_goal(other).about["saved"]
    assert points.current is current  # answers stay at the point in force until someone changes it
    outside.tune(current.about["goal"])
    assert current.about["saved"]


@pytest.mark.parametrize("text", ["", "[]", '{"files": {}, "fusions": []}', '{"files": {}, "fusions": [3]}'])
def test_a_manifest_that_was_spoilt_names_no_choice(model: api.Model, text: str) -> None:
    assert model.folder is not None
    points = OperatingPoints(model)
    (model.folder / "branchout.json").write_text(text, encoding="utf-8")
    assert not points.current.about["saved"]
