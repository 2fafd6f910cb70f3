"""The comparison on one's own photos."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import BASE, NEW, exemplars, run, untrained
from PIL import Image

from branchout import api
from branchout.bench import photo_methods, photos
from branchout.bench.photo_methods import BRANCHOUT, METHODS, Answers, Case
from branchout.bench.photos import open_case, parse_effort
from branchout.data.augment import for_kind
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.method.recipes import BRANCHOUT as BRANCHOUT_RECIPE
from branchout.method.running.effort import BRANCHES, Effort
from branchout.training.loop import Event

QUICK = Effort(2, epochs=2)


@pytest.fixture(scope="module")
def case(base: api.Model, train: Samples, val: Samples) -> Case:
    return open_case(base, train.of_classes(NEW), exemplars(train), val.of_classes([*BASE, *NEW]), QUICK)


def test_every_method_answers_for_every_test_image(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo_methods, "RATES", (0.3, 0.01))  # the first is far too high
    monkeypatch.setattr(photo_methods, "FINE_TUNING", replace(photo_methods.FINE_TUNING, epochs=5))
    found = dict(photos.run(case, list(METHODS), [0], tmp_path / "letters", "mine", "letters"))
    five = found.pop("five-steps")
    assert "--new has 3" in str(five)
    assert list(found) == [{"deeper": "layer3"}.get(name, name) for name in METHODS if name != "five-steps"]
    for name, row in found.items():
        assert isinstance(row, dict), row
        new = np.isin(case.test.names, NEW).mean()
        for metrics in (row["metrics"], row["two_fold"]):
            expected = (1 - new) * metrics["base"] + new * metrics["novel"]
            assert metrics["all"] == pytest.approx(expected, abs=0.02)
            assert metrics["avg"] == pytest.approx((metrics["base"] + metrics["novel"]) / 2, abs=0.02)
            assert metrics["drop"] == pytest.approx(row["before"] - metrics["base"], abs=0.02)
        kept = json.loads((tmp_path / "letters" / f"{name}-cpu.json").read_text())
        assert kept == row
        assert (kept["base_classes"], kept["novel_classes"], kept["test_images"]) == (8, 3, len(case.test))
        assert kept["peak_memory_bytes"] > 10**7
        ours = name in BRANCHOUT or name == "layer3"
        trained = kept["per_seed"][0].get("trained")
        assert (trained["effort"]["epochs"] if ours else trained) == (2 if ours else None)
    assert found["fine-tuning"]["metrics"]["avg"] > 20


def test_a_row_is_measured_once_and_continued_with_more_seeds(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def guess(case: Case, seed: int) -> Callable[[], Answers]:
        asked.append(seed)
        columns = np.zeros((len(case.test), case.task.space.columns))
        columns[:, seed] = 1.0
        return lambda: Answers(np.full(len(case.test), seed), columns, case.task.space)

    monkeypatch.setattr(photos, "METHODS", {"guess": guess})

    def rows(seeds: list[int], plan: str = "") -> dict[str, Any]:
        ((_, row),) = photos.run(case, ["guess"], seeds, tmp_path, "mine", "letters", plan)
        assert isinstance(row, dict)
        return row

    assert rows([0])["seeds"] == [0]
    whole = rows([0, 1])
    assert asked == [0, 1]
    assert whole["seeds"] == [0, 1]
    assert rows([1]) == whole
    assert rows([0], plan="views=2")["settings"]["plan"] == "views=2"
    assert asked == [0, 1, 0]
    assert {path.name for path in tmp_path.glob("*.json")} == {"guess-cpu.json", "guess-views=2-cpu.json"}
    monkeypatch.setattr(photos, "provenance", lambda: {"commit": "another", "versions": {}, "hardware": ""})
    rows([0, 1])
    assert asked == [0, 1, 0]  # the row is complete
    assert rows([0, 2])["seeds"] == [0, 2]
    assert asked == [0, 1, 0, 0, 2]  # seeds of two commits make no row
    marked = tmp_path / "guess-cpu.json"
    marked.write_text(json.dumps(json.loads(marked.read_text()) | {"outdated": "the method guesses better"}))
    assert "outdated" not in rows([0])
    assert asked == [0, 1, 0, 0, 2, 0]


def test_other_methods_see_large_photos_augmented_as_branchout_does(case: Case) -> None:
    ours = BRANCHOUT_RECIPE.stage_one.most_hue
    assert replace(case.task, kind="photo", size=224).augmentation.hue == ours < for_kind("photo", 224, few=True).hue


def test_a_plan_is_used_as_it_is_given(base: api.Model, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse_effort("views=4,exemplar_views=1,exemplar_share=0.5,epochs=15")
    assert given == BRANCHES[1]  # as on a CPU
    assert parse_effort("views=3,stops=0,compressed=0,batch=32") == Effort(3, batch=32)
    for wrong in ("views", "speed=3", "epochs=3", "views=many"):
        with pytest.raises(BranchoutError, match="exemplar_share"):
            parse_effort(wrong)
    extended = case.extended(base, case.new, case.old, "last", 0)
    assert extended.saved.history[-1]["effort"]["epochs"] == 2
    assert len(extended.saved.history[-1]["losses"]) == 2


def test_without_test_images_a_fifth_of_each_class_is_held_out(base: api.Model, train: Samples) -> None:
    new, old = train.of_classes(NEW), exemplars(train)
    case = open_case(base, new, old, None)
    assert case.new.counts() == dict.fromkeys(NEW, 16)
    assert not set(case.new.ids) & set(case.test.ids)
    assert not set(case.old.ids) & set(case.test.ids)
    assert len(case.test) == len(new) + len(old) - len(case.new) - len(case.old)


def test_a_test_image_of_no_known_class_is_named(base: api.Model, train: Samples, val: Samples) -> None:
    with pytest.raises(BranchoutError, match="'commercial at', which neither the base nor --new has"):
        open_case(base, train.of_classes(NEW), exemplars(train), val.of_classes(["commercial at"]))


def test_an_old_image_of_no_known_class_is_said_to_be_in_the_memory(base: api.Model, train: Samples) -> None:
    with pytest.raises(BranchoutError, match="--memory has images of 'commercial at'"):
        open_case(base, train.of_classes(NEW), train.of_classes([*BASE, "commercial at"]), None)


def test_single_old_images_leave_nothing_to_measure_old_classes_on(base: api.Model, train: Samples) -> None:
    with pytest.raises(BranchoutError, match="two images of a class"):
        open_case(base, train.of_classes(NEW), exemplars(train, per_class=1), None)


def test_a_base_that_has_learned_a_step_is_refused(case: Case) -> None:
    extended = SimpleNamespace(classifier=untrained(BASE, NEW))
    with pytest.raises(BranchoutError, match="learned 1 step already"):
        open_case(extended, case.new, case.old, case.test)  # type: ignore[arg-type]


def test_one_new_class_leaves_logistic_regression_out_and_every_seed_is_reported(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    events: list[Event] = []
    case = open_case(base, train.of_classes(NEW[:1]), exemplars(train), val.of_classes(BASE), None, events.append)
    found = dict(photos.run(case, ["logistic-regression", "nearest-class-mean"], [0, 1], tmp_path, "mine", "one"))
    assert "--new has one" in found["logistic-regression"]
    assert "novel" not in found["nearest-class-mean"]["metrics"]  # no test image of it
    told = [event.done for event in events if "nearest-class-mean" in event.work]
    assert told == [0, 1, 2]


def test_from_the_command_line(base: api.Model, train: Samples, val: Samples, tmp_path: Path) -> None:
    for part, samples in (("new", train.of_classes(NEW)), ("old", exemplars(train).of_classes(BASE[1:]))):
        for number, name in enumerate(samples.names):
            place = tmp_path / "shop" / part / str(name)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(samples.read(number)[:, :, 0]).save(place / f"{number}.png")
    words = ["bench", "photos", "--new", tmp_path / "shop/new", "--memory", tmp_path / "shop/old", "--seeds", "0"]
    status, _, complained = run(*words)
    assert status == 1
    assert "--base efficientnet_lite0" in complained
    words += ["--base", base.folder, "--out", tmp_path / "rows", "--method", "nearest-class-mean", "--method"]
    status, told, _ = run(*words, "logistic-regression")
    assert status == 0
    assert told.startswith("8 + 3 classes")  # before anything is measured
    assert "left out: nearest-class-mean" in told  # one old class has no image
    row = json.loads((tmp_path / "rows/shop" / base.folder.name / "logistic-regression-cpu.json").read_text())
    assert f"{row['metrics']['novel']:.1f}" in told
    status, told, _ = run(*words, "logistic-regression", "--name", "mine", "--plan", "views=2")
    assert status == 1  # a plan is for Branchout's own methods
    status, _, complained = run(*words, "magic")
    assert status == 1
    assert "ranpac" in complained
