"""The commands about data, as a user types them: what they print, what they write, and how they fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import Answer, run
from PIL import Image

from branchout import __version__
from branchout.data.datasets import resolve
from branchout.data.glyphs import glyphs
from branchout.data.scenarios import NAMES, Scenario

SCRIPT = Path(sys.executable).parent / "branchout"
WIDE = "300"
"""Columns of the terminal, so that no sentence is broken in two."""


def typed(*words: str | Path) -> Answer:
    """The real command, in a process of its own."""
    done = subprocess.run(
        [SCRIPT, *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": WIDE},
        timeout=100,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four classes of ten pictures each."""
    root = tmp_path / "photos"
    for number, name in enumerate(["cat", "dog", "fish", "oak"]):
        (root / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (32, 24), (10 + 60 * number, 20 * i, 77)).save(root / name / f"{i}.png")
    return root


# Quick answers.


def test_help_and_typing_errors_are_answered_without_the_slow_libraries() -> None:
    """Each in one process: help, an unknown command, an unknown option, the version, a number that is none."""
    asked = [["--help"], ["scenario", "-h"], ["nonsense"], ["data", "--nonsense"], ["version"]]
    asked += [["scenario", "disjoint", "glyphs", "--novel", "many"]]
    code = f"""
import json, sys
from typer.testing import CliRunner
from branchout.cli import app
answers = [(r.exit_code, r.output) for r in (CliRunner().invoke(app, words) for words in {asked!r})]
heavy = ("torch", "torchvision", "timm", "matplotlib", "sklearn", "scipy", "numpy", "PIL")
print(json.dumps([answers, [name for name in heavy if name in sys.modules]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": WIDE},
        timeout=100,
        check=True,
    )
    answers, imported = json.loads(done.stdout)
    assert imported == []
    assert [status for status, _ in answers] == [0, 0, 2, 2, 0, 2]
    for (_, output), words in zip(
        answers,
        [
            ["Usage: ", "data", "scenario", "version"],
            ["Usage: ", "--novel", "--classes", "--out"],
            ["No such command", "nonsense"],
            ["No such option", "--nonsense"],
            [__version__],
            ["Invalid value for '--novel'", "whole number"],
        ],
        strict=True,
    ):
        assert all(word in output for word in words), output
        assert "Traceback" not in output


def test_nothing_typed_is_answered_with_help() -> None:
    assert "Usage: " in "".join(run()[1:])


# data


def test_a_folder_with_a_broken_file_is_shown_and_the_file_is_named(photos: Path, tmp_path: Path) -> None:
    whole = (photos / "cat" / "0.png").read_bytes()
    (photos / "cat" / "broken.png").write_bytes(whole[: len(whole) // 2])
    (photos / "dog" / "page.jpg").write_text("<html>404 not found</html>")
    answer = typed("data", photos, "--sheet", tmp_path / "out.png")
    assert answer.status == 0, answer.err
    assert answer.err == ""
    assert re.search(r"1 (truncated|corrupt): cat/broken\.png", answer.out)
    assert "1 not an image: dog/page.jpg" in answer.out
    numbers = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in answer.out.splitlines() if "│" in line}
    assert [cell.strip() for cell in numbers["train"]] == ["4", "32", "8", "8", "8", "32×24"]
    assert [cell.strip() for cell in numbers["val"]] == ["4", "8", "2", "2", "2", "32×24"]
    assert f"4 of 4 classes are shown in {tmp_path / 'out.png'}" in answer.out
    with Image.open(tmp_path / "out.png") as sheet:
        assert sheet.size == (4 * 356 + 8, 96 + 8)


def test_a_dataset_that_is_not_there_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    answer = typed("data", tmp_path / "nowhere")
    assert answer.status == 1
    assert answer.out == ""
    assert answer.err.startswith("error: no dataset ")
    assert str(tmp_path / "nowhere") in answer.err
    assert "Built in: glyphs" in answer.err
    assert "Traceback" not in answer.err


def test_pictures_of_many_sizes_are_summed_up_and_the_sheet_shows_some_classes(photos: Path, tmp_path: Path) -> None:
    Image.new("RGB", (10, 20)).save(photos / "cat" / "small.png")
    Image.new("RGB", (100, 200)).save(photos / "cat" / "large.png")
    Image.new("L", (50, 40)).save(photos / "dog" / "grey.png")
    answer = run("data", photos, "--sheet", tmp_path / "out.png", "--classes", "2")
    assert answer.status == 0
    assert re.search(r"\d+×\d+ … 32×24 … \d+×\d+", answer.out)
    assert "2 of 4 classes are shown in" in answer.out


def test_a_sheet_that_cannot_be_written_is_an_error(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, words in (("sheet.nonsense", "--sheet sheet.png"), ("file/sheet.png", "file, not a folder")):
        answer = run("data", photos, "--sheet", tmp_path / name)
        assert answer.status == 1
        assert words in answer.err
        assert not (tmp_path / name).exists()


def test_a_folder_that_is_no_dataset_shows_the_layout_expected(photos: Path) -> None:
    answer = run("data", photos / "cat")
    assert answer.status == 1
    assert "one folder per class" in answer.err


# scenario


def test_a_scenario_of_glyphs_is_written_to_a_file_that_can_be_used(tmp_path: Path) -> None:
    answer = run("scenario", "disjoint", "glyphs", "--base", "20", "--novel", "5", "--out", tmp_path / "s.json")
    assert answer.status == 0, answer.err
    assert f"written to {tmp_path / 's.json'}" in answer.out
    plan = Scenario.load(tmp_path / "s.json")
    assert (plan.name, plan.dataset, plan.seed) == ("disjoint", "glyphs", 0)
    assert [len(names) for names in plan.branches] == [20, 5]
    train = plan.train(glyphs())
    assert np.bincount(train.origin).tolist() == [20 * 48, 5 * 48]
    for number in (20, 5, 20 * 48, 5 * 48):
        assert re.search(rf"│\s+{number:,} │", answer.out), number  # the table says so too


def test_options_reach_the_scenario(tmp_path: Path) -> None:
    words = ["scenario", "steps", "glyphs", "--base", "10", "--novel", "3", "--steps", "4", "--out"]
    for seed in ("0", "1"):
        assert run(*words, tmp_path / f"{seed}.json", "--seed", seed).status == 0
    first, second = (Scenario.load(tmp_path / f"{seed}.json") for seed in ("0", "1"))
    assert [len(names) for names in first.branches] == [10, 3, 3, 3, 3]
    assert (first.seed, second.seed) == (0, 1)
    assert first.branches != second.branches
    assert run("scenario", "overlap-random-shuffled", "glyphs", "--base", "10", "--novel", "6", "--overlap", "2",
               "--out", tmp_path / "o.json").status == 0  # fmt: skip
    assert len(Scenario.load(tmp_path / "o.json").space.overlap) == 2


def test_an_unknown_scenario_lists_the_known_ones() -> None:
    answer = run("scenario", "nonsense", "glyphs")
    assert answer.status == 1
    assert answer.out == ""
    assert "no scenario is called 'nonsense'" in answer.err
    assert all(name in answer.err for name in NAMES)


def test_more_classes_than_there_are_is_an_error(tmp_path: Path) -> None:
    answer = run("scenario", "disjoint", "glyphs", "--base", "5000", "--novel", "5", "--out", tmp_path / "s.json")
    assert answer.status == 1
    assert "5005" in answer.err
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize("content", [None, b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_features_that_cannot_be_read_are_an_error(photos: Path, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "f.npy").write_bytes(content)
    answer = run("scenario", "overlap-full", photos, "--novel", "2", "--features", tmp_path / "f.npy")
    assert answer.status == 1
    assert "f.npy is not a readable .npy file" in answer.err


@pytest.mark.parametrize("wrong", [np.zeros(4), np.full((4, 2), np.nan), np.array([["a"]])])
def test_features_that_are_no_table_of_numbers_are_an_error(photos: Path, tmp_path: Path, wrong: np.ndarray) -> None:
    np.save(tmp_path / "f.npy", wrong)
    answer = run("scenario", "overlap-full", photos, "--novel", "2", "--features", tmp_path / "f.npy")
    assert answer.status == 1
    assert "f.npy is not a table of features" in answer.err


# scenario --classes


def test_the_users_own_facts_make_other_scenarios_possible(photos: Path, tmp_path: Path) -> None:
    facts = {
        "domains": {"cat": "animal", "dog": "animal", "fish": "animal", "oak": "plant"},
        "base_domain": "animal",
        "siblings": [["pet", "cat", "dog"]],
    }
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    words = [photos, "--classes", tmp_path / "facts.json", "--out", tmp_path / "s.json"]
    answer = run("scenario", "disjoint-domain", *words, "--base", "2", "--novel", "1")
    assert answer.status == 0, answer.err
    plan = Scenario.load(tmp_path / "s.json")
    assert set(plan.branches[0]) < {"cat", "dog", "fish"}
    assert plan.branches[1] == ("oak",)
    answer = run("scenario", "overlap-style", *words, "--base", "2", "--novel", "2", "--overlap", "1")
    assert answer.status == 0, answer.err
    plan = Scenario.load(tmp_path / "s.json")
    assert plan.space.overlap == ("pet",)
    train = plan.train(resolve(str(photos)))
    pets = train.of_classes(["pet"])
    for origin, name in enumerate(("cat", "dog")):
        assert {i.split("/")[0] for i in pets.select(pets.origin == origin).ids} == {name}
    missing = run("scenario", "disjoint-domain", photos, "--base", "2", "--novel", "1")
    assert missing.status == 1  # without the facts it was not possible


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"domains": {"cats": "animal"}}', ["no class is called 'cats'", "did you mean cat?"]),
        ('{"siblings": [["pet", "cat", "dgo"]]}', ["no class is called 'dgo'", "did you mean dog?"]),
        ('{"domains": {"cat": "animal"}, "base_domain": "plant"}', ["base_domain is 'plant'"]),
        ("{cat: animal}", ["is not valid JSON", "property name"]),
        ("[1, 2]", ["does not describe classes", "Expected JSON such as", '"siblings": [[']),
        ('{"domains": ["cat"]}', ["does not describe classes"]),
        ('{"siblings": [["cat", "dog"]]}', ["does not describe classes"]),
        ('{"siblings": 3}', ["does not describe classes"]),
        (None, ["cannot be read", "no such file"]),
    ],
)
def test_facts_that_do_not_fit_say_what_is_wrong(
    photos: Path, tmp_path: Path, text: str | None, words: list[str]
) -> None:
    if text is not None:
        (tmp_path / "facts.json").write_text(text)
    answer = run(
        "scenario", "disjoint", photos, "--base", "2", "--novel", "1", "--classes", tmp_path / "facts.json",
        "--out", tmp_path / "s.json",
    )  # fmt: skip
    assert answer.status == 1
    assert answer.err.startswith("error: ")
    assert "facts.json" in answer.err
    for word in words:
        assert word in answer.err
    assert not (tmp_path / "s.json").exists()


def test_the_version_is_the_packages() -> None:
    assert run("version") == run("--version") == Answer(0, f"{__version__}\n", "")
