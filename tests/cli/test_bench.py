"""The bench from the command line."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import BASE, NEW, run
from PIL import Image

from benchmarks.paper.__main__ import write_pages
from branchout import api
from branchout.bench.rows import number as rounded
from branchout.bench.tables import table_named
from branchout.data.samples import Samples


@pytest.fixture(scope="module")
def folder(train: Samples, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("letters")
    for part, table in (("train", train), ("val", val)):
        chosen = table.of_classes([*BASE, *NEW])
        for number, name in enumerate(chosen.names):
            place = root / part / str(name)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.repeat(chosen.read(number), 3, axis=2)).save(place / f"{number}.png")
    return root


EPOCHS = ("--epochs", "1", "--branch-epochs", "1")
NARROW = ("--width", "8", "--size", "32")
BRIEF = (*EPOCHS, *NARROW, "--seeds", "1")
SMALL = (*BRIEF, "--exemplars", "4")
FOUR = "-exemplars4"
"""What the rows of a table with four exemplars, not its own ten, are called by."""


def test_the_list_names_every_table_and_method() -> None:
    status, told, _ = run("bench", "--list")
    assert status == 0
    for name in ("sota", "overlap-domain-clustered", "podnet", "ranpac", "score-fusion-branchout", "learned-routing"):
        assert name in told


def test_methods_in_a_scenario_of_ones_own(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "--data", folder, "--scenario", "disjoint", "--base-classes", "8", *SMALL, "--out", tmp_path]
    status, told, _ = run(*words, "--method", "branchout", "--method", "ncm", "--method", "aper")
    assert status == 0
    rows = sorted(path.name for path in tmp_path.rglob("*.json"))
    assert len(rows) == 3 + 4
    assert "left out: aper" in told  # it wants a ViT
    row = json.loads(next(tmp_path.rglob("score-fusion-branchout-avg.json")).read_text())
    assert (row["base_classes"], row["novel_classes"]) == (8, 3)  # an even share of the rest
    assert row["parameters"] > row["base_parameters"]
    more, seconds = (row["parameters"] - row["base_parameters"]) / 1e6, sum(row["seconds"].values())
    figures = [row["metrics"][name] for name in ("all", "base", "novel", "avg")]
    shown = [rounded(value) for value in figures] + [f"{more:.2f}", f"{seconds:.0f}"]
    lines = [line.split() for line in told.splitlines()]
    assert ["avg", *shown] in lines[lines.index(["score-fusion-branchout"]) :]
    assert all(len(line) <= 80 for line in told.splitlines() if "dial-" in line)
    assert "…" not in told
    write_pages(tmp_path, tmp_path / "docs")
    with (tmp_path / "docs" / "results" / "rows.csv").open(newline="") as file:
        listed = [row["file"] for row in csv.DictReader(file)]
    assert len(listed) == 7
    assert all((tmp_path / name).is_file() for name in listed)


def test_a_transformer_from_scratch_is_a_base_for_all_who_take_part_in_its_table(folder: Path, tmp_path: Path) -> None:
    names = table_named("disjoint-40").methods_for("vit_tiny")
    words = ["bench", "--data", folder, "--scenario", "disjoint", "--base-classes", "8", "--arch", "vit_tiny"]
    words += [*SMALL, "--out", tmp_path, *(word for name in names for word in ("--method", name))]
    status, told, complained = run(*words)
    assert (status, complained) == (0, "")
    assert "left out" not in told
    rows = {path.stem: json.loads(path.read_text()) for path in tmp_path.rglob("vit_tiny/*.json")}
    assert {f"{name}-plain" for name in names if not name.startswith("score-fusion")} <= set(rows)
    aper = rows["aper-plain"]
    assert (aper["arch"], aper["settings"]["pretraining"]["optimiser"]) == ("vit_tiny", "adamw")
    assert "optimiser" not in aper["settings"]["network"]
    assert len({row["base_weights"] for row in rows.values() if row["method"] != "joint"}) == 1
    status, told, _ = run(*words)  # nothing is refused or made again
    assert status == 0
    assert {path.stem: json.loads(path.read_text()) for path in tmp_path.rglob("vit_tiny/*.json")} == rows
    status, _, complained = run(*words, "--schedule", "paper")
    assert status == 1
    assert "--schedule fast: AdamW for 60 epochs" in complained


def test_all_tables_are_run_at_sizes_that_fit_but_for_those_that_cannot_be_drawn(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "all", "--data", folder, *SMALL, "--arch", "resnet10", "--method", "ncm", "--out", tmp_path]
    status, told, complained = run(*words)
    assert status == 0
    for table in ("branch-depth", "overlap-domain-shuffled", "overlap-domain-clustered"):
        assert f"left out: {table}{FOUR}: '{folder.name}' has no" in told + complained
    assert f"left out: overlap-style{FOUR}: '{folder.name}' has no" in told + complained
    shown = f"disjoint-40{FOUR}: 10 + 1 classes, resnet10 at 32 pixels, a base trained for 1 epoch; 1 of 1 methods"
    assert shown in told
    made = {path.parts[-3].removesuffix(FOUR) for path in tmp_path.rglob("ncm-plain.json")}
    assert {"disjoint-40", "multistep", "disjoint-200", "overlap-random-clustered", "overlap-full"} <= made
    lost = next(tmp_path.rglob(f"overlap-full{FOUR}/resnet10/ncm-plain.json"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    lost.unlink()
    status, told, _ = run(*words)
    assert status == 0
    assert f"overlap-full{FOUR}: " in told
    assert f"disjoint-40{FOUR}: 10" not in told  # nothing of it is missing
    assert re.search(rf"disjoint-40{FOUR}: .* not measured again", told)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert {path for path in after if after[path] != before[path]} <= {lost}
    assert after.keys() == before.keys()


def test_outdated_rows_of_tables_are_measured_again(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "--data", folder, *EPOCHS, "--seeds", "1", "--arch", "resnet10", "--out", tmp_path]
    status, _, complained = run(*words, "--stale", "--exemplars", "4")
    assert status == 1
    assert "--exemplars" in complained
    status, told, _ = run(*words, "--stale")
    assert status == 0
    assert "No outdated rows" in told
    assert run(*words, *NARROW, "disjoint-40", "--exemplars", "4", "--method", "ncm", "--method", "pretrained")[0] == 0
    place = next(tmp_path.rglob("ncm-plain.json"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    place.write_text(json.dumps({**json.loads(place.read_text()), "metrics": {}, "outdated": "its means"}))
    status, _, complained = run(*words, "--stale", "disjoint-40")
    assert status == 1
    assert "--stale" in complained
    (tmp_path / folder.name / "demo").mkdir()
    (tmp_path / folder.name / "demo" / "any.json").write_text("{}")  # no row
    status, told, _ = run(*words, "--stale", "--method", "pretrained")
    assert status == 0
    assert "for the methods and network given" in told
    assert "outdated" in json.loads(place.read_text())
    status, told, _ = run(*words, "--stale", "--minutes", "0")
    assert status == 0
    line = next(line for line in told.splitlines() if line.split()[:3] == [f"disjoint-40{FOUR}", "resnet10", "ncm"])
    assert " s " in line
    assert "not started: 1 of 1" in told
    assert "outdated" in json.loads(place.read_text())
    wrong_words = (
        (["--minutes", "5", "disjoint-40"], "--stale"),
        (["--minutes", "0", "disjoint-40"], "--stale"),
        (["--minutes", "5", "--stale", "--workers", "2"], "--workers"),
    )
    for wrong, said in wrong_words:
        status, _, complained = run(*words, *wrong)
        assert status == 1
        assert said in complained
    assert run(*words, "--stale", "--minutes", "30")[0] == 0
    made = json.loads(place.read_text())
    assert "outdated" not in made
    assert made["metrics"] == json.loads(before[place])["metrics"]
    assert all(path.read_bytes() == before[path] for path in before if path != place)


def test_rows_with_fewer_seeds_get_the_others(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "--data", folder, *EPOCHS, "--arch", "resnet10", "--out", tmp_path]
    methods = ["--method", "wa", "--method", "ncm", "--method", "pretrained"]
    assert run(*words, *NARROW, "disjoint-40", "--exemplars", "4", *methods, "--seeds", "1,2")[0] == 0
    rows = {path.stem: path for path in tmp_path.rglob("*-plain.json")}
    before = {name: path.read_bytes() for name, path in rows.items()}
    assert json.loads(before["wa-plain"])["seeds"] == [1]  # it trains a whole network
    status, told, _ = run(*words, "--stale", "--all-seeds", "--seeds", "2,1")
    assert status == 0
    assert "fewer seeds" in told  # none has only the first of these seeds
    status, told, _ = run(*words, "--stale", "--all-seeds", "--seeds", "1,2", "--minutes", "0")
    assert status == 0
    assert "not started: 1 of 1" in told
    assert run(*words, "--stale", "--all-seeds", "--seeds", "1,2")[0] == 0
    after = {name: json.loads(path.read_text()) for name, path in rows.items()}
    assert after["wa-plain"]["seeds"] == [1, 2]
    assert after["wa-plain"]["per_seed"][0] == json.loads(before["wa-plain"])["per_seed"][0]
    assert all(rows[name].read_bytes() == before[name] for name in ("ncm-plain", "pretrained-plain"))


def test_methods_from_a_base_of_ones_own(folder: Path, base: api.Model, tmp_path: Path) -> None:
    assert base.folder is not None
    words = ["bench", "--data", folder, "--scenario", "disjoint", "--base", base.folder, "--novel-classes", "2"]
    words += ["--epochs", "1", "--exemplars", "4", "--seeds", "1", "--method", "ncm", "--out", tmp_path]
    status, told, complained = run(*words)
    assert (status, complained) == (0, "")
    assert f"disjoint-8+2-from-{base.folder.name} on {folder.name}, resnet10: 8 + 2" in told
    row = json.loads(next(tmp_path.rglob("ncm-plain.json")).read_text())
    assert row["settings"]["model"] == base.folder.name
    assert (row["settings"]["width"], row["settings"]["size"]) == (8, 32)
    status, _, complained = run(*words, "--width", "8")
    assert status == 1
    assert "the model given with --base decides --width" in complained


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "overlap-random-clustered", "--overlap", "1"], "start from any base: disjoint, steps"),
        (["--scenario", "disjoint-domain"], "start from any base: disjoint, steps"),
        (["--scenario", "disjoint", "--novel-classes", "4"], "4 new classes were asked for, but"),
        (["--scenario", "disjoint", "--overlap", "1"], "--overlap goes with the scenarios overlap-random-shuffled"),
        (["--scenario", "overlap-full", "--overlap", "1"], "in 'overlap-full' all new classes are old ones"),
        (["--scenario", "disjont", "--overlap", "1"], "did you mean disjoint?"),
        (["--scenario", "disjoint", "--base", "glyphs"], "of the base's 800 classes have no training images in"),
        (["--scenario", "disjoint", "--base", "nowhere"], "There is no saved model nowhere"),
        (["--scenario", "disjoint", "--base-classes", "8"], "the model given with --base decides --base-classes"),
        (["sota"], "--base needs --scenario"),
    ],
)
def test_a_base_that_does_not_go_with_what_is_asked_for(
    words: list[str],
    said: str,
    folder: Path,
    base: api.Model,
    tmp_path: Path,
) -> None:
    given = words if "--base" in words else [*words, "--base", str(base.folder)]
    novel = [] if "--novel-classes" in words or "sota" in words else ["--novel-classes", "2"]
    status, told, complained = run("bench", *given, *novel, "--method", "ncm", "--data", folder, "--out", tmp_path)
    assert status == 1
    assert said in complained
    assert "Traceback" not in complained + told
    assert not list(tmp_path.iterdir())


def test_rows_on_another_training_of_the_base_are_named(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "--data", folder, "--scenario", "disjoint", "--base-classes", "8", *SMALL, "--out", tmp_path]
    status, told, _ = run(*words, "--method", "ncm")
    assert status == 0
    assert "another training" not in told
    lost = next(tmp_path.rglob("ncm-plain.json"))
    lost.write_text(json.dumps({**json.loads(lost.read_text()), "base_weights": "of before"}))
    status, told, _ = run(*words, "--method", "ncm")
    assert status == 0
    assert f"warning: these rows of {lost.parent} were measured on another training run of the base model" in told
    assert "than the others: ncm-plain. To measure all with one, delete all rows" in told
    assert "another --out" in told


def test_several_processes_make_the_rows(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "--data", folder, "--scenario", "disjoint", "--base-classes", "8", *SMALL, "--out", tmp_path]
    status, told, _ = run(*words, "--method", "ncm", "--method", "aper", "--workers", "2")
    assert status == 0
    assert "left out: aper" in told
    assert len(list(tmp_path.rglob("ncm-*.json"))) == 4


def test_interrupted_its_processes_stop_too(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "--data", folder, "--scenario", "disjoint", "--base-classes", "8", "--novel-classes", "3"]
    words += ["--width", "8", "--size", "32", "--epochs", "4000", "--method", "finetune", "--method", "lwf"]
    process = subprocess.Popen(
        [sys.executable, "-m", "branchout", *map(str, words), "--workers", "2", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )
    until = time.monotonic() + 100
    while not list(tmp_path.rglob(".finetune.lock")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complained = process.communicate(timeout=60)  # which also waits for the pipe that its processes hold
    assert process.returncode == 130
    assert "interrupted" in complained
    assert "Traceback" not in complained
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a table, or a scenario with --scenario"),
        (["sota", "--scenario", "disjoint"], "sota and --scenario were given"),
        (["--stale", "--scenario", "disjoint"], "--scenario and --stale were given"),
        (["--stale", "--data", "glyphs", "--out", "not/there"], "no folder not/there"),
        (["--scenario", "disjoint", "--method", "PODNET"], "podnet"),
        (["sotta"], "no table is called 'sotta'; did you mean sota"),
        (["sota", "--method", "fintune"], "did you mean finetune"),
        (["sota", "--seeds", "one"], "--seeds takes numbers separated by commas"),
        (["sota", "--scale", "moon"], "no scale is called 'moon'"),
        (["sota", "--schedule", "lazy"], "no schedule is called 'lazy'"),
        (["--scenario", "disjoint", "--base-classes", "8"], "name the methods to run with --method"),
        (["--scenario", "disjoint", "--method", "ncm"], "give the number of new classes"),
        (["--scenario", "disjoint", "--base-classes", "80", "--novel-classes", "3", "--method", "ncm"], "83 base and"),
        (["sota", "--base-classes", "5"], "a table has sizes of its own, so --base-classes goes with --scenario only"),
        (["--scenario", "disjoint", "--scale", "paper", "--method", "ncm"], "--scale is for tables"),
        (["sota", "--data", "nowhere"], "no dataset 'nowhere'"),
        (["report"], "python -m benchmarks.paper"),
        (["--scenario", "disjiont", "--base-classes", "8", "--method", "ncm"], "did you mean disjoint?"),
        (["sota", "--arch", "resnet19"], "no architecture is called 'resnet19'; did you mean resnet18?"),
        (["sota", "--seeds", "1,1"], "--seeds names a seed twice"),
        (["sota", "--seeds=-1"], "each of --seeds must be a whole number of at least 0"),
        (["sota", "--seeds", str(2**64)], f"at most {2**63 - 1:,}"),
        (["sota", "--split", str(2**64)], f"at most {2**63 - 1:,}"),
        (["sota", "--scale", "paper"], "those are the sizes of --scale paper, and with --scale fitted they fit"),
        (["branch-depth"], "Put a classes.json into its folder"),
        (["sota", "--exemplars", "5", "--memory-total", "50"], "leave --exemplars out"),
        (["--stale", "--memory-total", "50"], "leave --memory-total out"),
        (["--stale", "--scale", "paper"], "its own scale; leave --scale out, or name a table"),
        (["--stale", "--split", "1"], "its own split; leave --split out, or name a table"),
        (["--stale", "--width", "32"], "its own width; leave --width out"),
        (["--stale", "--size", "64"], "its own input size; leave --size out"),
        (["--stale", "--novel-classes", "5"], "--novel-classes goes with --scenario only"),
        (
            ["--scenario", "disjoint", "--base-classes", "8", "--method", "ncm", "--out", "/proc/x"],
            "could not be written",
        ),
        (["--scenario", "disjoint", "--base-classes", "8", "--method", "ncm", "--out", __file__], "name a folder"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(words: list[str], said: str, folder: Path, tmp_path: Path) -> None:
    given = words if "--data" in words else [*words, "--data", str(folder)]
    given = given if "--out" in words else [*given, "--out", str(tmp_path)]
    status, told, complained = run("bench", *given)
    assert status == 1
    assert said in complained
    assert "Traceback" not in complained + told
    assert not list(tmp_path.iterdir())  # neither locks nor empty folders
