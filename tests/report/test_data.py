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
from branchout.report.counts import Changed, counts_at
from branchout.report.data import ReportData
from branchout.report.gallery import spread, thumbnail
from branchout.report.other_methods import OtherResult, read_results


@pytest.fixture(scope="module")
def once(extended: api.Model, val: Samples) -> ReportData:
    return extended.report_data(val.of_classes(extended.classes), gallery=5)


@pytest.fixture(scope="module")
def twice(extended_twice: api.Model, val: Samples) -> ReportData:
    return extended_twice.report_data(val, gallery=5)


@pytest.fixture(scope="module")
def alone(base: api.Model, train: Samples, val: Samples) -> api.Model:
    """Extended without any old image."""
    return base.extend(train.of_classes(NEW), val=val.of_classes(NEW), epochs=2)


@pytest.mark.parametrize(("which", "told"), [("extended", "once"), ("extended_twice", "twice")])
def test_numbers_are_those_of_evaluate(which: str, told: str, val: Samples, request: pytest.FixtureRequest) -> None:
    model: api.Model = request.getfixturevalue(which)
    facts: ReportData = request.getfixturevalue(told)
    found = model.evaluate(val.of_classes(model.classes))
    test, saved = facts.test, facts.points.saved
    for name in ("all", "base", "novel", "overlap", "avg"):
        assert test.figures[name][saved] == getattr(found.after, name)
        assert test.figures_before[name] == getattr(found.before, name)
    rows = {row.name: (row.images, row.before, row.after) for row in found.classes()}
    counts = counts_at(facts, saved)
    shown = {
        facts.classes[r.number]: (r.images, None if r.before is None else r.before / r.images, r.after / r.images)
        for r in counts.classes
    }
    assert shown == rows
    confusion = found.confusion().tolist()
    for part in counts.parts:
        for other, wrong in part.wrong.items():
            right = part.right if other == part.number else 0
            assert wrong + right == confusion[part.number][other]
    assert test.labels == found.labels.tolist()


def test_classes_that_lost_most_come_first_and_new_ones_last(once: ReportData) -> None:
    rows = counts_at(once, once.points.saved).classes
    losses = [row.change for row in rows if row.before is not None]
    assert losses == sorted(losses)
    assert losses[0] < 0
    assert all(row.after == row.before + row.gained - row.lost for row in rows if row.before is not None)
    new = [row.before is None for row in rows]
    assert new == sorted(new)
    assert sum(new) == len(NEW)


@pytest.mark.parametrize(
    ("lost", "gained", "noise"),
    [(0, 0, True), (1, 0, True), (5, 0, True), (6, 0, False), (57, 4, False), (30, 20, True)],
)
def test_few_changed_answers_are_within_noise(lost: int, gained: int, noise: bool) -> None:
    """By the exact sign test, 5 of 5 lost images have p = 0.06, and 6 of 6 have p = 0.03."""
    found, mirrored = (Changed(images=100, lost=a, gained=b).noise for a, b in ((lost, gained), (gained, lost)))
    assert found == mirrored == (noise and lost + gained > 0)


@pytest.mark.parametrize("told", ["once", "twice"])
def test_counts_at_every_point_are_those_of_the_answers_there(told: str, request: pytest.FixtureRequest) -> None:
    facts: ReportData = request.getfixturevalue(told)
    test, first = facts.test, {name: n for n, branch in enumerate(facts.branches) for name in branch.new}
    assert [first[name] for name in facts.classes] == facts.first_branch
    crossed = 0
    for point in range(len(facts.points)):
        counts = counts_at(facts, point)
        pairs: dict[str, Counter[tuple[int, int]]] = {key: Counter() for key in ("to_later", "to_earlier", "right")}
        right: Counter[int] = Counter()
        wrong: Counter[tuple[int, int]] = Counter()
        kept: Counter[str] = Counter()
        for label, answer, before in zip(test.labels, test.answers.at(point).tolist(), test.before, strict=True):
            known = label < test.known
            apart = facts.first_branch[answer] - facts.first_branch[label]
            if apart:
                pairs["to_later" if apart > 0 else "to_earlier"][label, answer] += 1
                pairs["right"][label, answer] += known and before == label
            if label == answer:
                right[label] += 1
            else:
                wrong[facts.part_of_class[label], facts.part_of_class[answer]] += 1
            if known and facts.parts[facts.part_of_class[label]] != "overlap":
                was, now = before == label, answer == label
                kept.update(images=1, before=was, after=now, lost=was and not now, gained=now and not was)
        for key in ("to_later", "to_earlier"):
            found = {(p.label, p.answer): (p.images, p.were_right) for p in getattr(counts, key)}
            assert found == {pair: (n, pairs["right"][pair]) for pair, n in pairs[key].items()}
        crossed += len(pairs["to_later"])
        assert {row.number: row.after for row in counts.classes} == {n: right[n] for n in set(test.labels)}
        assert {(p.number, o): n for p in counts.parts for o, n in p.wrong.items() if n} == wrong
        assert vars(counts.old) == kept
    assert crossed


def test_forgotten_and_gained(twice: ReportData, extended: api.Model, val: Samples) -> None:
    test, saved = twice.test, twice.points.saved
    before = extended.evaluate(val.of_classes(extended.classes))
    was = dict(zip(val.of_classes(extended.classes).ids.tolist(), before.answers.tolist(), strict=True))
    now = test.answers.at(saved).tolist()
    forgotten = [n for n, name in enumerate(val.ids) if was.get(name) == test.labels[n] != now[n]]
    gained = [n for n, name in enumerate(val.ids) if now[n] == test.labels[n] and was.get(name) != now[n]]
    assert forgotten
    assert gained
    counts = counts_at(twice, saved)
    assert counts.galleries == {"forgotten": forgotten, "gained": gained}
    assert set(test.galleries["forgotten"][: min(5, len(forgotten))]) <= set(forgotten)
    assert set(test.galleries["gained"][:5]) <= set(gained)
    assert len(test.galleries["gained"]) <= 15
    for image, kept in test.thumbnails.items():
        picture = Image.open(io.BytesIO(base64.b64decode(kept.src.split(",")[1])))
        assert np.array_equal(np.asarray(picture), val.read(image)[:, :, 0])
        assert kept.file == val.ids[image]
        assert sum(kept.shares) == pytest.approx(1, abs=0.002)
        assert len(kept.shares) == 3


def test_overlapping_classes_count_which_branch_answered(twice: ReportData) -> None:
    for point in range(len(twice.points)):
        rows = [row for row in counts_at(twice, point).classes if row.by_branch]
        assert sorted(twice.classes[row.number] for row in rows) == sorted([BASE[0], NEW[0]])
        for row in rows:
            assert sum(row.by_branch) == row.after
            owners = [d for d, b in enumerate(twice.branches) if twice.classes[row.number] in [*b.new, *b.known]]
            assert all(number == 0 for d, number in enumerate(row.by_branch) if d not in owners)


def test_a_goal_chooses_its_point(extended: api.Model, once: ReportData) -> None:
    points = once.points
    named = 0
    for point, goal in enumerate(points.goal_for):
        if goal is not None:
            named += 1
            chosen = extended.frontier.choose(goal)
            assert extended.frontier.settings[chosen].tolist() == points.settings[point]
    assert named >= len(set(points.goals.values()))
    assert points.goal_for[points.saved] is not None


def test_data_is_json_and_always_the_same(extended: api.Model, once: ReportData, val: Samples) -> None:
    again = extended.report_data(val.of_classes(extended.classes), gallery=5)
    assert json.dumps(once.to_dict(), allow_nan=False) == json.dumps(again.to_dict(), allow_nan=False)


def test_history_tells_what_was_added_when_and_from_what(extended_twice: api.Model) -> None:
    facts = extended_twice.report_data()
    base, first, second = facts.branches
    assert base.new == list(BASE)
    assert first.new == sorted(NEW)
    assert sorted(second.known) == sorted([BASE[0], NEW[0]])
    assert first.event["images"] == 20 * len(NEW)
    assert len(first.losses) == 15
    assert len(second.losses) == 4
    for branch in (base, first, second):
        assert branch.event["when"].endswith("+00:00")
    assert facts.test is None
    assert facts.files["step-2.safetensors"] == (extended_twice.folder / "step-2.safetensors").stat().st_size  # type: ignore[operator]


def test_what_was_measured_moves_with_the_goal(base: api.Model, train: Samples, val: Samples) -> None:
    model = base.extend(train.of_classes(NEW), memory=exemplars(train), val=val.of_classes([*BASE, *NEW]), epochs=2)
    there = model.report_data().held_out
    assert there.after["novel"] == there.goals["balanced"]["novel"]
    model.tune("avg")
    assert model.report_data().held_out.after["novel"] == there.goals["avg"]["novel"]
    far = [name for name in model.report_data().points.goal_for if name and ">=" in name]
    assert far
    model.tune(far[0])
    assert model.report_data().held_out.after is None


def test_stand_ins_are_no_measurement(alone: api.Model, val: Samples) -> None:
    assert alone.report_data().points.measured == "pseudo"
    found = alone.report_data(val.of_classes([*BASE, *NEW]))
    assert found.test.figures["base"][found.points.saved] is not None


def test_a_base_model_has_classes_and_nothing_to_compare(base: api.Model, val: Samples) -> None:
    facts = base.report_data(val.of_classes(BASE))
    assert facts.points is None
    assert facts.test.before is None
    assert facts.test.figures["all"] == [base.evaluate(val.of_classes(BASE)).after.all]
    assert len(counts_at(facts, 0).classes) == len(BASE)


def test_images_of_other_classes_are_refused(extended: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match="of these classes: commercial at"):
        extended.report_data(val)


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
    found = read_results(tmp_path, space)
    assert found.left_out == 1
    plain, joint = found.results
    figures = {"all": 0.625, "base": 0.61, "novel": 0.666, "overlap": None, "avg": None}
    assert joint == OtherResult("joint", "all", "letters", "x/joint.json", figures)
    assert plain.method == "plain"


def test_a_folder_without_rows_is_answered_with_what_a_row_is(tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match=r'contains no results.*JSON file with "metrics"'):
        read_results(tmp_path, LabelSpace.of("a"))
    with pytest.raises(BranchoutError, match="none does not exist"):
        read_results(tmp_path / "none", LabelSpace.of("a"))


def _write(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(row))
