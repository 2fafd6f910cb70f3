"""`branchout compact`, as a user types it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BASE, CPU, LATER, NEW, class_folders, exemplars, fixed_batch, logits, refused, run, well
from torch import nn

from branchout import api
from branchout.data.samples import Samples
from branchout.model import checkpoint
from branchout.model.card import compaction_rows
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.report.page import render
from branchout.units import percent, size


@pytest.fixture(scope="module")
def kept(train: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images of every class, in folders."""
    names = [*BASE, *NEW, *LATER]
    return class_folders(exemplars(train, names), tmp_path_factory.mktemp("kept"), names, 5)


def with_linear_head(base: api.Model) -> api.Model:
    """The same predictions by a linear head: rows of one length on features of one length, almost."""
    model, rows = base.classifier, base.classifier.base_head.weight
    head = nn.Linear(rows.shape[1], len(rows), bias=False)
    head.load_state_dict({"weight": nn.functional.normalize(rows) * 8})
    changed = Classifier(model.arch, model.backbone, head, BASE, model.preprocessing, model.kind)
    return api.Model(replace(base.saved, classifier=changed), None, CPU)


@pytest.mark.parametrize("shared", [(), (BASE[0], NEW[0])], ids=["disjoint", "overlapping"])
@pytest.mark.parametrize("kind", [CosineHead, nn.Linear])
def test_both_kinds_of_heads_with_and_without_shared_classes(
    kind: type[nn.Module],
    shared: tuple[str, ...],
    base: api.Model,
    train: Samples,
    val: Samples,
    kept: Path,
    tmp_path: Path,
) -> None:
    large, small, validation = tmp_path / "large", tmp_path / "small", tmp_path / "val"
    class_folders(val, validation, [*BASE, *NEW, *LATER], 8)
    start = base if kind is CosineHead else with_linear_head(base)
    first = start.extend(train.of_classes(NEW), memory=exemplars(train), epochs=8)
    before = first.extend(
        train.of_classes([*LATER, *shared]), memory=exemplars(train, [*BASE, *NEW]), out=large, epochs=8
    )
    well(run("compact", large, "--memory", kept, "--val", validation, "--out", small, "--epochs", "20"))
    after = api.load(small)
    assert after.classes == before.classes
    assert [type(step.head) for step in after.classifier.steps] == [kind]
    assert after.classifier.space.overlap == shared[:1]  # the other one is in the one new branch only
    assert after.evaluate(val).after.all > before.evaluate(val).after.all - 0.12
    called = api.load(large).compact(kept, val=validation, epochs=20)
    assert torch.equal(logits(called.classifier, fixed_batch()), logits(after.classifier, fixed_batch()))
    assert "novel" in well(run("tune", small, "--goal", "novel"))


def test_it_prints_size_speed_and_accuracy_and_the_model_can_be_used(
    extended_twice: api.Model, kept: Path, tmp_path: Path
) -> None:
    assert extended_twice.folder is not None
    small = tmp_path / "small"
    told = well(run("compact", extended_twice.folder, "--memory", kept, "--out", small, "--epochs", "2"))
    plan, _ = told.split("compaction", 1)
    assert "2 step branches into 1 in 2 epochs" in plan
    assert "images of --memory" in plan
    assert re.search(r"about [\d.]+ (s|min)", plan)
    now, later = re.search(r"weights on disk.*: (\S+ \S+) → about (\S+ \S+)", plan).groups()  # type: ignore[union-attr]
    assert float(now.split()[0]) > float(later.split()[0])
    lines = {line.split("│")[1].strip(): line.split("│")[2:4] for line in told.splitlines() if line.count("│") == 4}
    assert [cell.strip() for cell in lines["step branches"]] == ["2", "1"]
    told_later = float(lines["weights on disk"][1].split()[0])
    assert float(later.split()[0]) == pytest.approx(told_later, rel=0.02)  # which has deltas
    assert {"parameters", "weights on disk", "images a second", "all accuracy in %"} <= lines.keys()
    assert "14 classes" in told
    assert str(small) in told
    assert (f"branchout tune {small}" in told) == (len(api.load(small).frontier) > 1)
    assert f"branchout evaluate {small}" in told
    assert "avg" in well(run("tune", small, "--goal", "avg"))
    picture = next(kept.rglob("*.png"))
    assert well(run("predict", small, picture))
    page = tmp_path / "page.html"
    well(run("report", small, "--out", page))
    assert page.exists()
    again = run("compact", extended_twice.folder, "--memory", kept, "--out", small)
    refused(again, "small", "exists")


def test_card_and_report_compare_with_the_model_that_was_compacted(
    extended_twice: api.Model, train: Samples, val: Samples, kept: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    class_folders(val, tmp_path / "val", [*BASE, *NEW, *LATER], 8)
    model = extended_twice.compact(kept, val=tmp_path / "val", out=small, epochs=2)
    event = model.saved.history[-1]
    before, after = (percent(found["all"]) for found in (event["before"], event["measured"]["after"]))
    card = (small / "README.md").read_text(encoding="utf-8")
    assert "was compacted from 2 step branches to 1" in card
    assert "| accuracy on held-out test images |" not in card  # its before would be the base's
    assert f"| all accuracy in % | {before} | {after} |" in card
    bytes_before, bytes_after = (size(checkpoint.weight_bytes(each.saved)) for each in (extended_twice, model))
    assert f"| weights on disk | {bytes_before} | {bytes_after} |" in card

    page = words_of(render(api.load(small).report_data()))
    images = f"{event['measured']['images']} images"
    assert f"small was compacted from 2 step branches to 1 and answers {after}% of {images} right" in page
    assert f"{percent(event['before']['novel'])} before" in page
    assert f"{bytes_before} → {bytes_after}" in page
    assert "extend" not in page
    page = words_of(render(api.load(small).report_data(val)))
    assert "“before” is the base alone" in page
    assert "than before" not in page
    assert "table of compact counts other images" in page

    model.tune("all" if model.saved.step_points[-1].goal != "all" else "avg")
    assert f"| all accuracy in % | {before} | {after} |" in (small / "README.md").read_text(encoding="utf-8")
    held_out = model.report_data().held_out
    assert held_out is not None
    assert held_out.before == {}  # what was recorded is of another goal
    larger = model.extend(train.of_classes(NEW), memory=kept, epochs=1, out=tmp_path / "larger", warn=lambda _: None)
    assert "knows" in words_of(render(larger.report_data()))
    card = (tmp_path / "larger" / "README.md").read_text(encoding="utf-8")
    assert "was compacted from 2 step branches to 1, and 1 step added more" in card
    assert "all accuracy in %" not in card  # of the model before that step


def words_of(page: str) -> str:
    """The text of a report without its script and styles."""
    shown = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", "", shown).split())


def test_a_model_without_recorded_sizes_is_still_told_to_be_compacted() -> None:
    event = {"what": "compact", "steps": 3, "branches": 2, "before": None, "measured": None}
    assert compaction_rows(event) == [("step branches", "3", "2")]
    assert compaction_rows({"what": "extend"}) == []


def test_refusals(extended: api.Model, train: Samples, kept: Path, tmp_path: Path) -> None:
    assert extended.folder is not None
    refused(run("compact", extended.folder, "--memory", kept, "--out", tmp_path / "small"), "1 step", "extend")
    heads = extended.extend(
        train.of_classes(LATER), memory=exemplars(train, [*BASE, *NEW]), branch="fc", out=tmp_path / "heads", epochs=1
    )
    assert heads.folder is not None
    again = run("compact", heads.folder, "--memory", kept, "--out", tmp_path / "small")
    refused(again, "save nothing", "1 branch in 2 steps")
    missing = run("compact", extended.folder, "--out", tmp_path / "small")
    assert missing.status == 2
    assert "--memory" in missing.err


def test_kept_images_may_lie_in_nested_folders(extended: api.Model, kept: Path, tmp_path: Path) -> None:
    """As the folders that the model was extended with: the reading is chosen by the same option."""
    assert extended.folder is not None
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "signs").symlink_to(kept)
    words = ("compact", extended.folder, "--memory", tmp_path / "nested", "--out", tmp_path / "small")
    refused(run(*words), "--classes-from leaves")
    refused(run(*words, "--classes-from", "leaves"), "1 step", "extend")
