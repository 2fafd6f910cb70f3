"""The comparison on one's own photos."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BASE, NEW, exemplars, run, untrained
from PIL import Image

from branchout import api
from branchout.bench import photos
from branchout.bench.photos import Case
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.training.loop import Event


@pytest.fixture(scope="module")
def case(base: api.Model, train: Samples, val: Samples) -> Case:
    return Case.of(base, train.of_classes(NEW), exemplars(train), val.of_classes([*BASE, *NEW]))


def test_every_method_answers_for_every_test_image(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = api.Model.extend
    monkeypatch.setattr(api.Model, "extend", lambda self, new, **given: extend(self, new, **given, epochs=2))
    found = dict(photos.run(case, list(photos.METHODS), [0], tmp_path, "mine", "letters"))
    assert list(found) == list(photos.METHODS)
    for name, row in found.items():
        assert isinstance(row, dict), row
        metrics = row["metrics"]
        new = np.isin(case.test.names, NEW).mean()
        expected = (1 - new) * metrics["base"] + new * metrics["novel"]
        assert metrics["all"] == pytest.approx(expected, abs=0.02)
        assert metrics["drop"] == pytest.approx(row["before"] - metrics["base"], abs=0.02)
        kept = json.loads((tmp_path / "letters" / "mine" / f"{name}-cpu.json").read_text())
        assert kept["metrics"] == metrics
        assert (kept["base_classes"], kept["novel_classes"], kept["test_images"]) == (8, 3, len(case.test))
    assert found["fine-tuning"]["metrics"]["novel"] > 50


def test_without_test_images_a_fifth_of_each_class_is_held_out(base: api.Model, train: Samples) -> None:
    new, old = train.of_classes(NEW), exemplars(train)
    case = Case.of(base, new, old, None)
    assert case.new.counts() == dict.fromkeys(NEW, 16)
    assert not set(case.new.ids) & set(case.test.ids)
    assert not set(case.old.ids) & set(case.test.ids)
    assert len(case.test) == len(new) + len(old) - len(case.new) - len(case.old)


def test_a_test_image_of_no_known_class_is_named(base: api.Model, train: Samples, val: Samples) -> None:
    with pytest.raises(BranchoutError, match="'commercial at', which neither the base nor --new has"):
        Case.of(base, train.of_classes(NEW), exemplars(train), val.of_classes(["commercial at"]))


def test_an_old_image_of_no_known_class_is_said_to_be_in_the_memory(base: api.Model, train: Samples) -> None:
    with pytest.raises(BranchoutError, match="--memory has images of 'commercial at'"):
        Case.of(base, train.of_classes(NEW), train.of_classes([*BASE, "commercial at"]), None)


def test_single_old_images_leave_nothing_to_measure_old_classes_on(base: api.Model, train: Samples) -> None:
    case = Case.of(base, train.of_classes(NEW), exemplars(train, per_class=1), None)
    with pytest.raises(BranchoutError, match="two images of a class"):
        case.before()


def test_a_base_that_has_learned_a_step_is_refused(case: Case) -> None:
    extended = SimpleNamespace(classifier=untrained(BASE, NEW))
    with pytest.raises(BranchoutError, match="learned 1 step already"):
        Case.of(extended, case.new, case.old, case.test)  # type: ignore[arg-type]


def test_one_new_class_leaves_logistic_regression_out_and_every_seed_is_reported(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    events: list[Event] = []
    case = Case.of(base, train.of_classes(NEW[:1]), exemplars(train), val.of_classes(BASE), events.append)
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
    status, _, complained = run(*words, "magic")
    assert status == 1
    assert "ranpac" in complained
