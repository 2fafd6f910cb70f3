"""The comparison on one's own photos."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import BASE, NEW, exemplars, run
from PIL import Image

from branchout import api
from branchout.bench import photos
from branchout.bench.photos import Case
from branchout.data.samples import Samples
from branchout.errors import BranchoutError


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
        kept = json.loads((tmp_path / "letters" / f"{name}-cpu.json").read_text())
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
    assert "left out: nearest-class-mean" in told  # one old class has no image
    row = json.loads((tmp_path / "rows/shop/logistic-regression-cpu.json").read_text())
    assert f"{row['metrics']['novel']:.1f}" in told
    status, _, complained = run(*words, "magic")
    assert status == 1
    assert "ranpac" in complained
