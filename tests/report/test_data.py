"""The facts behind a report, against slow counts and against `evaluate`."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BASE, NEW, exemplars
from PIL import Image

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.report.gallery import spread, thumbnail
from branchout.report.rows import rows_in

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def once(extended: api.Model, val: Samples) -> Facts:
    return extended.facts(val.of_classes(extended.classes), gallery=5)


@pytest.fixture(scope="module")
def twice(extended_twice: api.Model, val: Samples) -> Facts:
    return extended_twice.facts(val, gallery=5)


@pytest.fixture(scope="module")
def alone(base: api.Model, train: Samples, val: Samples) -> api.Model:
    """Extended without any old image."""
    return base.extend(train.of_classes(NEW), val=val.of_classes(NEW), epochs=2)


@pytest.mark.parametrize(("which", "told"), [("extended", "once"), ("extended_twice", "twice")])
def test_numbers_are_those_of_evaluate(which: str, told: str, val: Samples, request: pytest.FixtureRequest) -> None:
    model: api.Model = request.getfixturevalue(which)
    facts: Facts = request.getfixturevalue(told)
    found = model.evaluate(val.of_classes(model.classes))
    test, saved = facts["test"], facts["frontier"]["saved"]
    for name in ("all", "base", "novel", "overlap", "avg"):
        assert test["figures"][name][saved] == getattr(found.after, name)
        assert test["figures_before"][name] == getattr(found.before, name)
    rows = {row["class"]: (row["images"], row["before"], row["after"]) for row in found.classes()}
    assert {facts["classes"][r["class"]]: (r["images"], r["before"], r["after"]) for r in test["classes"]} == rows
    assert test["confusion"] == found.confusion().tolist()
    assert test["labels"] == found.labels.tolist()


def test_classes_that_lost_most_come_first_and_new_ones_last(once: Facts) -> None:
    rows = once["test"]["classes"]
    losses = [row["after"] - row["before"] for row in rows if row["before"] is not None]
    assert losses == sorted(losses)
    assert losses[0] < 0
    new = [row["before"] is None for row in rows]
    assert new == sorted(new)
    assert sum(new) == len(NEW)


@pytest.mark.parametrize("told", ["once", "twice"])
def test_who_takes_images_from_whom(told: str, request: pytest.FixtureRequest) -> None:
    facts: Facts = request.getfixturevalue(told)
    test, branches = facts["test"], facts["branches"]
    first = {name: number for number, branch in enumerate(branches) for name in branch["new"]}
    assert [first[name] for name in facts["classes"]] == facts["first_branch"]
    now = _answers(facts, facts["frontier"]["saved"])
    later: Counter[tuple[int, int]] = Counter()
    earlier: Counter[tuple[int, int]] = Counter()
    right: Counter[tuple[int, int]] = Counter()
    for label, answer, before in zip(test["labels"], now, test["before"], strict=True):
        if facts["first_branch"][answer] > facts["first_branch"][label]:
            later[label, answer] += 1
        if facts["first_branch"][answer] < facts["first_branch"][label]:
            earlier[label, answer] += 1
        right[label, answer] += before == label
    for key, wanted in (("to_later", later), ("to_earlier", earlier)):
        assert {(a, b): (n, r) for a, b, n, r in test[key]} == {pair: (n, right[pair]) for pair, n in wanted.items()}
        counts = [row[2] for row in test[key]]
        assert counts == sorted(counts, reverse=True)
    assert later


def test_forgotten_and_won(twice: Facts, extended: api.Model, val: Samples) -> None:
    test = twice["test"]
    before = extended.evaluate(val.of_classes(extended.classes))
    was = dict(zip(val.of_classes(extended.classes).ids.tolist(), before.answers.tolist(), strict=True))
    now = _answers(twice, twice["frontier"]["saved"])
    forgotten = [n for n, name in enumerate(val.ids) if was.get(name) == test["labels"][n] != now[n]]
    won = [n for n, name in enumerate(val.ids) if now[n] == test["labels"][n] and was.get(name) != now[n]]
    assert forgotten
    assert won
    assert test["forgotten"]["count"] == len(forgotten)
    assert test["won"]["count"] == len(won)
    assert set(test["forgotten"]["images"][: min(5, len(forgotten))]) <= set(forgotten)
    assert set(test["won"]["images"][:5]) <= set(won)
    assert len(test["won"]["images"]) <= 15
    for image, kept in test["pictures"].items():
        picture = Image.open(io.BytesIO(base64.b64decode(kept["src"].split(",")[1])))
        assert np.array_equal(np.asarray(picture), val.read(int(image))[:, :, 0])
        assert kept["file"] == val.ids[int(image)]


def test_overlapping_classes_count_who_answered(twice: Facts) -> None:
    test = twice["test"]
    assert sorted(twice["classes"][row["class"]] for row in test["overlap"]) == sorted([BASE[0], NEW[0]])
    for row in test["overlap"]:
        assert sum(row["by"]) == round(row["after"] * row["images"])
        owners = [
            d for d, b in enumerate(twice["branches"]) if twice["classes"][row["class"]] in [*b["new"], *b["known"]]
        ]
        assert all(number == 0 for d, number in enumerate(row["by"]) if d not in owners)


def test_a_goal_leads_to_its_point(extended: api.Model, once: Facts) -> None:
    frontier = once["frontier"]
    led = 0
    for point, goal in enumerate(frontier["reach"]):
        if goal is not None:
            led += 1
            chosen = extended.frontier.choose(goal)
            assert extended.frontier.settings[chosen].tolist() == frontier["settings"][point]
    assert led >= len(set(frontier["goals"].values()))
    assert frontier["reach"][frontier["saved"]] is not None


def test_facts_are_plain_data_and_always_the_same(extended: api.Model, once: Facts, val: Samples) -> None:
    assert json.loads(json.dumps(once)) == json.loads(
        json.dumps(extended.facts(val.of_classes(extended.classes), gallery=5))
    )


def test_history_tells_what_was_added_when_and_from_what(extended_twice: api.Model) -> None:
    facts = extended_twice.facts()
    base, first, second = facts["branches"]
    assert base["new"] == list(BASE)
    assert first["new"] == sorted(NEW)
    assert sorted(second["known"]) == sorted([BASE[0], NEW[0]])
    assert first["event"]["images"] == 20 * len(NEW)
    assert len(first["losses"]) == 15
    assert len(second["losses"]) == 4
    for branch in (base, first, second):
        assert branch["event"]["when"].endswith("+00:00")
    assert facts["test"] is None
    assert (
        facts["sizes"]["files"]["step-2.safetensors"] == (extended_twice.folder / "step-2.safetensors").stat().st_size
    )  # type: ignore[operator]


def test_what_was_measured_moves_with_the_goal(base: api.Model, train: Samples, val: Samples) -> None:
    model = base.extend(train.of_classes(NEW), memory=exemplars(train), val=val.of_classes([*BASE, *NEW]), epochs=2)
    there = model.facts()["measured"]
    assert there["after"]["novel"] == there["goals"]["balanced"]["novel"]
    model.tune("avg")
    assert model.facts()["measured"]["after"]["novel"] == there["goals"]["avg"]["novel"]
    far = [name for name in model.facts()["frontier"]["reach"] if name and ">=" in name]
    assert far
    model.tune(far[0])
    assert model.facts()["measured"]["after"] is None


def test_stand_ins_are_no_measurement(alone: api.Model, val: Samples) -> None:
    assert alone.facts()["frontier"]["measured"] == "pseudo"
    found = alone.facts(val.of_classes([*BASE, *NEW]))
    assert found["test"]["figures"]["base"][found["frontier"]["saved"]] is not None


def test_a_base_model_has_classes_and_nothing_to_compare(base: api.Model, val: Samples) -> None:
    facts = base.facts(val.of_classes(BASE))
    assert facts["frontier"] is None
    assert facts["test"]["before"] is None
    assert facts["test"]["figures"]["all"] == [base.evaluate(val.of_classes(BASE)).after.all]
    assert len(facts["test"]["classes"]) == len(BASE)


def test_images_of_other_classes_are_refused(extended: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match="these classes are not the model's: commercial at"):
        extended.facts(val)


# Pictures.


def test_a_gallery_shows_every_class_before_it_repeats_one() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    assert spread(np.arange(6), labels).tolist() == [0, 3, 5, 1, 4, 2]


def test_photographs_become_small_and_keep_their_shape() -> None:
    photo = np.random.default_rng(0).integers(0, 255, (300, 600, 3), dtype=np.uint8)
    made = thumbnail(photo)
    picture = Image.open(io.BytesIO(base64.b64decode(made.removeprefix("data:image/jpeg;base64,"))))
    assert picture.size == (128, 64)


# Rows of other methods.


def test_rows_of_the_same_task_are_read(tmp_path: Path) -> None:
    space = LabelSpace.of("abc", "de")
    row = {"base_classes": 3, "novel_classes": 2, "steps": 1, "method": "joint", "point": "all", "dataset": "letters"}
    _write(tmp_path / "x" / "joint.json", {**row, "metrics": {"all": 62.5, "base": 61, "novel": 66.6, "overlap": None}})
    _write(tmp_path / "other.json", {**row, "base_classes": 4, "metrics": {"all": 1}})
    _write(tmp_path / "plain.json", {"metrics": {"base": 50}})
    _write(tmp_path / "speed.json", {"ratio": 3})
    (tmp_path / "broken.json").write_text("{")
    found = rows_in(tmp_path, space)
    assert found["other"] == 1
    plain, joint = found["rows"]
    assert joint == {"method": "joint", "point": "all", "dataset": "letters", "file": "x/joint.json", "all": 0.625,
                     "base": 0.61, "novel": 0.666, "overlap": None, "avg": None}  # fmt: skip
    assert plain["method"] == "plain"


def test_a_folder_without_rows_is_answered_with_what_a_row_is(tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match='holds no measured row: a JSON file with "metrics"'):
        rows_in(tmp_path, LabelSpace.of("a"))
    with pytest.raises(BranchoutError, match="there is no folder"):
        rows_in(tmp_path / "none", LabelSpace.of("a"))


def _write(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(row))


def _answers(facts: Facts, point: int) -> list[int]:
    told = facts["test"]["answers"]
    now = list(told["first"])
    for image, at, value in zip(told["image"], told["point"], told["value"], strict=True):
        if at <= point:
            now[image] = value
    return now
