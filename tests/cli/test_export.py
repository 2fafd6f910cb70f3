"""The commands explain, export, push and pull, the files of evaluate, and extend for programs and TensorBoard."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BASE, NEW, refused, run, typed, well
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from branchout import api
from branchout import export as exporting
from branchout.cli import tensorboard
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.training.loop import Event


@pytest.fixture(scope="module", autouse=True)
def _wide() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module")
def photos(train: Samples, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of pictures: test (all that `extended` knows), new and memory."""
    root = tmp_path_factory.mktemp("photos")
    for folder, table, names, most in (
        ("test", val, [*BASE, *NEW], 3),
        ("new", train, NEW, 8),
        ("memory", train, BASE, 4),
    ):
        for name in names:
            (root / folder / name).mkdir(parents=True)
            for number in np.flatnonzero(table.names == name)[:most]:
                Image.fromarray(table.read(int(number))[:, :, 0]).save(root / folder / name / f"{number}.png")
    return root


# explain


def test_explain_shows_sums_that_add_up(extended_twice: api.Model, photos: Path) -> None:
    picture = next((photos / "test" / BASE[0]).iterdir())
    told = well(run("explain", extended_twice.folder, picture, "--memory", photos / "memory", "--nearest", "2"))
    why = extended_twice.explain(picture)
    shown = f"{picture}: {why.winner.name}, {100 * why.winner.probability:.1f}% (class of {why.known})"
    assert shown in told.splitlines()
    assert f"before step 2 the prediction was: {why.before[0]}, " in told
    for branch in ("the base", "step 1", "step 2"):
        assert f"{branch} on its own: " in told
    rows = [line for line in told.splitlines() if line.startswith("│")]
    assert len(rows) >= 3
    for row in rows:
        numbers = [cell.strip() for cell in row.split("│")[3:7]]
        own, delta, dial, logit = (float(text) if text else 0.0 for text in numbers)
        assert own + delta + dial == pytest.approx(logit, abs=1e-9)
    lead = re.search(r"leads .* by (\S+): own logits (\S+), other branches (\S+), dial (\S+)", told)
    assert lead
    whole, *parts = map(float, lead.groups())
    assert sum(parts) == pytest.approx(whole, abs=1e-9)
    nearest = told.split("nearest of 32 images to ")[1].splitlines()[1:]
    assert len(nearest) == 2
    assert all(str(photos / "memory") in line for line in nearest)


def test_explain_marks_what_pooling_chose(extended_twice: api.Model, photos: Path) -> None:
    """A class that several branches know has a row for each, and one of them counts."""
    told = well(run("explain", extended_twice.folder, photos / "test" / BASE[0], photos / "test" / NEW[0]))
    assert "pooled" in told
    assert told.count("◂ max") >= 1


def test_explain_compares_an_expected_class(extended_twice: api.Model, photos: Path) -> None:
    picture = next((photos / "test" / BASE[0]).iterdir())
    why = extended_twice.explain(picture, top=len(extended_twice.classes))
    last = why.answers[-1].name
    told = well(run("explain", extended_twice.folder, picture, "--expect", last))
    expected = extended_twice.explain(picture, expect=last).expected
    assert f"{why.winner.name} leads {last} by" in told
    assert f"{last} is ranked {len(extended_twice.classes)} with {100 * expected.score.probability:.1f}%" in told
    change = expected.dial_change
    assert (
        "no position of the dial" if change is None else f"{abs(change):.2f} {'higher' if change > 0 else 'lower'}"
    ) in told
    told = well(run("explain", extended_twice.folder, picture, "--expect", why.winner.name))
    assert f"{why.winner.name} is predicted" in told
    status, _, wrong = run("explain", extended_twice.folder, picture, "--expect", f"{last}x")
    assert status == 1
    assert last in wrong


def test_explain_a_base_is_short(base: api.Model, photos: Path) -> None:
    told = well(run("explain", base.folder, next((photos / "test" / BASE[1]).iterdir())))
    assert "leads" in told
    for word in ("known to", "before", "delta", "dial", "on its own", "nearest"):
        assert word not in told


def test_explain_as_json(extended_twice: api.Model, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    files = sorted((photos / "test" / NEW[0]).iterdir())
    answer = run("explain", extended_twice.folder, files[0], tmp_path / "broken.png", files[1], "--json",
                 "--memory", photos / "memory", "--memory", photos / "new", "--top", "2")  # fmt: skip
    assert answer.status == 0
    assert answer.err.startswith(f"left out: {tmp_path / 'broken.png'}: ")
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert [line["file"] for line in lines] == [str(files[0]), str(files[1])]
    for line, file in zip(lines, files, strict=False):
        assert line["answers"][0]["class"] == extended_twice.predict(file, top=1)[0][0]
        for told in line["answers"]:
            for column in told["columns"]:
                own, delta, dial = (np.float32(column[part]) for part in ("own", "delta", "dial"))
                assert (own + delta) + dial == np.float32(column["logit"])
        assert len(line["nearest"]) == 5
        assert all(Path(near["file"]).is_file() for near in line["nearest"])
        assert len(line["branches"][0]["own"]) == 2


def test_explain_answers_bad_input_kindly(extended: api.Model, photos: Path, tmp_path: Path) -> None:
    picture = next((photos / "test" / BASE[0]).iterdir())
    (tmp_path / "page.jpg").write_text("<html>")
    refused(run("explain", extended.folder, tmp_path / "page.jpg"), "page.jpg: not an image")
    refused(run("explain", extended.folder, tmp_path), str(tmp_path), "no images")
    refused(run("explain", tmp_path / "v9", picture), "There is no saved model")
    refused(run("explain", extended.folder, picture, "--memory", tmp_path / "no"), "There is no folder")
    assert run("explain", extended.folder, picture, "--top", "0").status == 2


# export


def test_export_says_how_near_it_is(extended: api.Model, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "v2.onnx"
    told = well(run("export", extended.folder, "--onnx", file, "--verify", photos / "test" / NEW[0]))
    assert re.search(
        r"checked on 3 images: logits differ by at most \d\.\de-0[5-9], all predictions are the same", told
    )
    assert f"{file}: " in told
    assert "11 classes; images (N × 1 × 32 × 32) in, logits and probabilities out" in told
    assert [path.name for path in file.parent.iterdir()] == ["v2.onnx"]


def test_export_answers_bad_input_kindly(
    extended: api.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.onnx"
    there.write_text("mine")
    refused(run("export", extended.folder, "--onnx", there), "there.onnx already exists")
    assert there.read_text() == "mine"
    refused(run("export", extended.folder, "--onnx", there / "x.onnx"), "cannot be written", "is a file, not a folder")
    refused(run("export", extended.folder, "--onnx", tmp_path), "already exists")
    for name in ("v2.tflite", "v2"):
        refused(run("export", extended.folder, "--onnx", tmp_path / name), name, "v2.onnx")
    refused(run("export", tmp_path / "v9", "--onnx", tmp_path / "x.onnx"), "There is no saved model")
    refused(run("export", extended.folder, "--onnx", tmp_path / "x.onnx", "--flip"), "mirrored character", "--flip")
    refused(run("export", extended.folder, "--onnx", tmp_path / "x.onnx", "--verify", tmp_path), "no images")
    assert run("export", extended.folder).status == 2
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    refused(run("export", extended.folder, "--onnx", tmp_path / "x.onnx"),
            "onnx and onnxscript and onnxruntime", 'pip install "branchout[export]"')  # fmt: skip
    assert list(tmp_path.iterdir()) == [there]


# evaluate


def test_evaluate_writes_what_it_found(extended: api.Model, photos: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a" / "classes.csv", tmp_path / "images.csv", tmp_path / "all.json"]
    told = well(run("evaluate", extended.folder, photos / "test", "--two-fold", "--csv", files[0],
                    "--images-csv", files[1], "--json", files[2]))  # fmt: skip
    assert f"written: {files[0]}, {files[1]}, {files[2]}" in told
    before = api.Model(extended.saved, None)
    before.classifier = extended.saved.model(0)
    expected = {}  # counted one picture at a time
    for path in sorted((photos / "test").rglob("*.png")):
        name = path.parent.name
        was = before.predict(path, top=1)[0][0] if name in BASE else ""
        expected[f"{name}/{path.name}"] = name, was, extended.predict(path, top=1)[0][0]
    with files[1].open(encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table))
    assert list(rows[0]) == ["file", "class", "before", "after"]
    assert {row["file"]: (row["class"], row["before"], row["after"]) for row in rows} == expected

    with files[0].open(encoding="utf-8", newline="") as table:
        classes = list(csv.DictReader(table))
    assert list(classes[0]) == ["class", "part", "images", "before", "after"]
    assert {row["class"]: row["part"] for row in classes} == {
        **dict.fromkeys(BASE, "base"),
        **dict.fromkeys(NEW, "step 1"),
    }
    for row in classes:
        mine = [answers for answers in expected.values() if answers[0] == row["class"]]
        assert int(row["images"]) == len(mine) == 3
        assert float(row["after"]) == pytest.approx(sum(now == name for name, _, now in mine) / 3)
        if row["class"] in BASE:
            assert float(row["before"]) == pytest.approx(sum(was == name for name, was, _ in mine) / 3)
        else:
            assert row["before"] == ""

    whole = json.loads(files[2].read_text(encoding="utf-8"))
    assert whole["images"] == len(expected) == 33
    right = sum(name == now for name, _, now in expected.values())
    assert whole["after"]["all"] == pytest.approx(right / 33)
    assert whole["before"]["base"] == pytest.approx(sum(name == was for name, was, _ in expected.values()) / 24)
    assert [row["class"] for row in whole["classes"]] == [row["class"] for row in classes]
    assert len(whole["answers"]) == 33
    assert whole["confusion"]["parts"] == ["base", "step 1", "overlap"]
    assert [sum(row) for row in whole["confusion"]["counts"]] == [24, 9, 0]
    assert set(whole["two_fold"]) == {"all", "balanced", "avg"}
    point = extended.saved.step_points[-1]
    assert whole["operating_point"] == {"goal": point.goal, "b": point.frontier["settings"][point.point][0]}


def test_evaluating_a_base_leaves_before_empty(base: api.Model, photos: Path, tmp_path: Path) -> None:
    file, whole = tmp_path / "c.csv", tmp_path / "c.json"
    well(run("evaluate", base.folder, photos / "memory", "--csv", file, "--json", whole))
    with file.open(encoding="utf-8", newline="") as table:
        assert {row["before"] for row in csv.DictReader(table)} == {""}
    told = json.loads(whole.read_text(encoding="utf-8"))
    assert told["before"] is None
    assert told["two_fold"] is None
    assert told["operating_point"] is None


def test_evaluate_answers_a_bad_place_before_it_works(
    extended: api.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.Model, "evaluate", lambda *_, **__: pytest.fail("evaluated"))
    words = ["evaluate", extended.folder, photos / "test"]
    (tmp_path / "file").write_text("")
    refused(run(*words, "--csv", tmp_path), "is a folder; name a file", "classes.csv")
    refused(run(*words, "--json", tmp_path / "file" / "x.json"), "is a file, not a folder")
    refused(run(*words, "--json", tmp_path / "x", "--csv", tmp_path / "x"), "Two tables cannot go to one file")


# extend, for programs


def events(told: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.splitlines()]


@pytest.fixture(scope="module")
def run_by_a_program(base: api.Model, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One extension with --json and --tensorboard, in a process of its own."""
    out = tmp_path_factory.mktemp("program") / "v2"
    (photos / "new" / NEW[0] / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    told = well(typed("extend", photos / "new", "--base", base.folder, "--memory", photos / "memory", "--val",
                      photos / "test", "--epochs", "3", "--out", out, "--json", "--tensorboard", out.parent / "board")
                )  # fmt: skip
    return out, told


def test_a_program_reads_one_event_a_line(run_by_a_program: tuple[Path, str]) -> None:
    out, told = run_by_a_program
    *before, result = events(told)
    assert any(e["event"] == "warning" and "broken.png" in e["message"] for e in before)
    progress = [event for event in before if event["event"] != "warning"]
    assert {event["event"] for event in progress} == {"progress"}
    learning = [event for event in progress if event["work"] == "Training the new branch"]
    assert [(event["done"], event["total"]) for event in learning] == [(1, 3), (2, 3), (3, 3)]
    model = api.load(out)
    losses = [round(event["figures"]["loss"], 5) for event in learning]
    assert losses == model.saved.history[-1]["losses"]
    assert result["event"] == "result"
    assert result["model"] == str(out)
    assert Path(result["card"]).is_file()
    assert (result["classes"], result["new_classes"], result["overlapping_classes"]) == (11, 3, 0)
    assert (result["images"], result["exemplars"]) == (24, 32)
    assert result["measured_on"] == model.saved.history[-1]["measured"]["images"]
    assert result["operating_points"] == model.saved.history[-1]["measured"]["goals"]
    assert set(result["operating_points"]) == {"all", "balanced", "avg"}
    assert result["before"]["base"] is not None
    assert result["parameters"] == model.classifier.parameter_counts()
    assert result["goal"] == "balanced"
    assert result["chosen_on"] == "dev"


def test_a_program_reads_errors_as_events(base: api.Model, photos: Path, run_by_a_program: tuple[Path, str]) -> None:
    out, _ = run_by_a_program
    words = ["extend", photos / "new", "--base", base.folder, "--json", "--out"]
    for more, said in (
        ([out], "already exists"),
        ([out.parent / "x", "--goal", "best"], "no goal is called 'best'"),
        ([out.parent / "x", "--memory", out.parent / "nowhere"], "There is no folder"),
        ([out.parent / "x", "--branch", "layer9"], "cannot branch at 'layer9'"),
    ):
        answer = run(*words, *more)
        assert answer.status == 1
        assert answer.err == ""
        *earlier, last = events(answer.out)
        assert last["event"] == "error"
        assert said in last["message"]
        assert not any(event["event"] == "error" for event in earlier)
    assert not list(out.parent.glob("*x*"))


def test_without_old_images_the_result_has_no_base_accuracy(base: api.Model, photos: Path, tmp_path: Path) -> None:
    told = well(
        run("extend", photos / "new", "--base", base.folder, "--epochs", "1", "--out", tmp_path / "v2", "--json")
    )
    result = events(told)[-1]
    assert result["chosen_on"] == "pseudo"
    assert result["before"] is None
    assert result["exemplars"] == 0
    assert result["after"]["base"] is None


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_gets_every_loss_and_every_goal(run_by_a_program: tuple[Path, str]) -> None:
    out, _ = run_by_a_program
    found = scalars(out.parent / "board")
    history = api.load(out).saved.history[-1]
    assert found["Training_the_new_branch/loss"] == [
        (n, pytest.approx(x, abs=1e-4)) for n, x in enumerate(history["losses"], 1)
    ]
    for goal in ("all", "balanced", "avg"):
        for name in ("all", "base", "novel", "avg"):
            assert found[f"goal_{goal}/{name}"] == [(1, pytest.approx(history["measured"]["goals"][goal][name]))]


def test_pretrain_writes_event_files_too(photos: Path, tmp_path: Path) -> None:
    told = well(run("pretrain", photos / "memory", "--width", "8", "--epochs", "2", "--size", "32",
                    "--out", tmp_path / "base", "--tensorboard", tmp_path / "board"))  # fmt: skip
    found = scalars(tmp_path / "board")
    assert [step for step, _ in found["Training_the_base_model/loss"]] == [1, 2]
    [(_, accuracy)] = found["Validation/accuracy"]
    assert f"{100 * accuracy:.1f}% accuracy" in told


def test_tensorboard_missing_or_in_the_way_is_said_first(
    base: api.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    commands = (
        ["pretrain", photos / "memory"],
        ["extend", photos / "new", "--base", base.folder],
    )
    for words in commands:
        refused(run(*words, "--out", tmp_path / "x", "--tensorboard", file), "is a file; name a folder")
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    for words in commands:
        refused(run(*words, "--out", tmp_path / "x", "--tensorboard", tmp_path / "b"),
                "--tensorboard needs tensorboard", 'pip install "branchout[tensorboard]"')  # fmt: skip
    assert list(tmp_path.iterdir()) == [file]


def test_a_board_that_cannot_be_opened_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BranchoutError, match="cannot be written"),
        tensorboard.event_files(tmp_path / "file" / "deeper"),
    ):
        pytest.fail("opened")
    with tensorboard.event_files(None) as on_progress:
        on_progress(Event("train", 1, 1, {"loss": 1.0}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
