"""Values, spread and variance of a row are those of its fields."""

import json
from pathlib import Path

import pytest
from measured import ROOT, data, row

from benchmarks.paper import rows
from benchmarks.paper.rows import Row, read
from branchout.bench.methods import method_named
from branchout.errors import BranchoutError

PLACE = "paper/disjoint-40/resnet10/bic-plain.json"


def test_the_spread_over_seeds_divides_by_one_less_than_their_number() -> None:
    seeds = [{"all": 60.0, "avg": 50.0}, {"all": 61.0, "avg": 53.0}, {"all": 62.0, "avg": 56.0}]
    found = row(PLACE, all=61.0, avg=53.0, seeds=[1, 2, 3], per_seed=seeds)
    assert found.spread("all") == pytest.approx(1.0)  # √(2 / 2); dividing by n would give 0.8
    assert found.spread("balanced") == pytest.approx(2.0)
    assert found.value("balanced") == 57.0
    assert row(PLACE, all=61.0, seeds=[1], per_seed=seeds[:1]).spread("all") is None


def test_seeds_that_share_one_stage_one_count_as_one_seed() -> None:
    seeds = [{"all": 60.0}, {"all": 61.0}, {"all": 65.0}]
    shared = row(PLACE, all=62.0, seeds=[1, 2, 3], per_seed=seeds, stage1_per_seed=False)
    assert shared.by_seed("all") == {1: 62.0}
    assert shared.spread("all") is None
    assert len(row(PLACE, all=62.0, seeds=[1, 2, 3], per_seed=seeds, stage1_per_seed=True).by_seed("all")) == 3


def test_every_row_of_several_seeds_says_whether_stage_one_was_trained_for_each() -> None:
    silent = []
    for path, each in read(ROOT / "results").items():
        if len(path.parts) != 4 or len(each.data["seeds"]) < 2:
            continue
        method = method_named(path.stem.removesuffix(f"-{each.data['point']}"))
        if method.stage_one_per_seed and each.data.get("stage1_per_seed") is None:
            silent.append(path)
    assert not silent


def test_an_accuracy_over_steps_has_the_base_as_its_first_step() -> None:
    steps = [[{"all": 60.0, "avg": 50.0}, {"all": 54.0, "avg": 40.0}], [{"all": 63.0}, {"all": 57.0}]]
    found = row(PLACE, incremental=61.0, seeds=[1, 2], per_step=steps, base_model=66.0)
    assert found.by_seed("incremental") == {1: 60.0, 2: 62.0}


def test_the_variance_is_that_of_a_weighted_sum_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.TEST_IMAGES, "paper", 10)
    found = row(PLACE, all=56.0, base=50.0, novel=80.0, avg=65.0)  # 80 images of old classes, 20 of new ones
    base, novel = 50 * 50 / 80, 80 * 20 / 20
    assert found.image_variance("base") == pytest.approx(base)
    assert found.image_variance("avg") == pytest.approx((base + novel) / 4)
    assert found.image_variance("all") == pytest.approx(0.8**2 * base + 0.2**2 * novel)
    assert found.image_variance("balanced") == pytest.approx(0.65**2 * base + 0.35**2 * novel)
    many = Row(found.path, {**found.data, "steps": 4})  # avg counts the base and each of four steps
    assert many.image_variance("avg") == pytest.approx(base / 25 + 16 * novel / 25)
    told = Row(found.path, {**found.data, "test_images": 1000})  # ten times as many
    assert told.image_variance("all") == pytest.approx(found.image_variance("all") / 10)
    alone = Row(found.path, {**found.data, "novel_alone": 80.0})  # on dev and test
    assert alone.image_variance("alone") == pytest.approx(novel / 2)


def test_photos_of_old_and_new_classes_are_counted_by_their_accuracies() -> None:
    found = row(PLACE, all=75.0, base=70.0, novel=90.0, scenario="photos", test_images=4000)
    assert found.images() == {"base": pytest.approx(3000), "novel": pytest.approx(1000)}


@pytest.mark.parametrize(("field", "mark"), [("superseded", " †"), ("outdated", " †"), ("other", "")])
def test_rows_to_measure_again_are_marked(field: str, mark: str) -> None:
    assert row(PLACE, **{field: "its dial"}).marks == mark


def test_a_file_that_is_no_row_is_named_and_another_base_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "paper" / "disjoint-40" / "resnet10"
    folder.mkdir(parents=True)
    for name, accuracy in (("lwf", 60.0), ("bic", 60.0), ("wa", 61.5)):
        content = {**data(name, "plain", all=50.0), "base_model": accuracy}
        (folder / f"{name}-plain.json").write_text(json.dumps(content))
    assert [path.stem for path, found in read(tmp_path).items() if found.other_base] == ["wa-plain"]
    for wrong in ("{", "[]", json.dumps({**data("lwf", "plain"), "metrics": {"all": "x"}})):
        (folder / "lwf-plain.json").write_text(wrong)
        with pytest.raises(BranchoutError, match=r"lwf-plain\.json cannot be read as a row \("):
            read(tmp_path)
