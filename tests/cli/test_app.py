"""What all commands share: help, errors that end them with a sentence, and text that is safe to print."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, NEW, SCRIPT, Answer, refused, run, typed, well
from PIL import Image
from safetensors import SafetensorError

from branchout import api
from branchout.cli.app import GROUPS, app, explained
from branchout.cli.json_events import print_json
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.goals import GOALS
from branchout.training.work_folder import work_folder, working_on

COMMANDS = [name for names in GROUPS.values() for name in names]
HOSTILE = "red \x1b[31m \x9b2J \u202e bird"


@pytest.fixture(scope="module")
def photos(train: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of new classes, one of whose names would change a terminal, and one image of each old class."""
    root = tmp_path_factory.mktemp("photos")
    for folder, name, source, count in (
        ("new", HOSTILE, NEW[0], 4),
        ("new", NEW[1], NEW[1], 4),
        *(("one", name, name, 1) for name in BASE),
    ):
        (root / folder / name).mkdir(parents=True)
        for number in np.flatnonzero(train.names == source)[:count]:
            Image.fromarray(train.read(int(number))[:, :, 0]).save(root / folder / name / f"{number}.png")
    return root


# Help.


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns_and_gives_an_example(command: str) -> None:
    told = well(run(*[command] if command else [], "--help"))
    assert all(len(line) <= 80 for line in told.splitlines())
    assert "<bool>" not in told
    assert not re.search(r"--[A-Z]", told)  # for typer 0.27 the metavar of an option without a name is its name
    if command == "":
        places = [told.index(f"\n  {name} ") for name in COMMANDS]
        assert places == sorted(places)
        return
    assert f"\nExample:\n  branchout {command}" in told
    assert not re.search(r"<\w+>|[{}]|\[\[", told)  # types, and brackets of the parser


def test_many_options_stand_in_groups() -> None:
    """In the groups of their purpose, each once; a command with few options has one list."""
    for words in ("extend", "serve", "inbox", "bench"):
        told = well(run(words, "--help"))
        options = re.findall(r"^  (?:-h, )?(--[a-z-]+)", told.partition("Arguments:")[2], re.MULTILINE)
        assert len(options) == len(set(options)) > 10
        assert len(re.findall(r"^[A-Z]\w+:$", told, re.MULTILINE)) >= 5
        assert "\nOptions:" not in told
    told = well(run("tune", "--help"))
    assert "\nOptions:\n  --goal TEXT" in told
    assert all(goal in told.partition("--goal")[2] for goal in GOALS)
    told = well(run("serve", "--help"))
    assert told.index("\nAddress:") < told.index("--host") < told.index("\nLimits:")
    assert " report [OPTIONS] MODEL [TEST]\n" in well(run("report", "--help"))


def test_the_help_says_what_is_kept_on_disk_where_memory_ends() -> None:
    told = " ".join(well(run("extend", "--help")).split())
    assert "stage II each; images and frozen features beyond it are kept on disk." in told


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["extend", "new", "--base", "b", "--out", "v", "--val", "one", "--val", "two"], "--val"),
        (["check", "new", "--base", "b", "--base=c"], "--base"),
        (["tune", "v2", "--goal", "avg", "--goal", "novel"], "--goal"),
    ],
)
def test_an_option_with_one_value_that_is_given_twice_is_refused(words: list[str], option: str) -> None:
    answer = run(*words)
    assert answer.status == 2
    assert option in answer.err
    assert "2 times" in answer.err


def test_flags_and_options_with_many_values_may_be_given_twice() -> None:
    refused(run("predict", "v2", "photo.jpg", "--flip", "--flip"), "photo.jpg")
    refused(run("inbox", "nowhere", "--dismiss", "1", "--dismiss", "2"), "nowhere")


def test_every_command_is_in_a_group() -> None:
    assert sorted(COMMANDS) == sorted(command.name or command.callback.__name__ for command in app.registered_commands)


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        (["--help"], ["torch", "numpy", "rich.markdown", "matplotlib"]),
        (["extend", "--help"], ["torch", "numpy", "rich.markdown", "matplotlib"]),
        (["extend"], ["torch", "numpy", "rich.markdown", "matplotlib"]),
        (["extend", "new", "--base", "base", "--out", "x", "--goal", "bst"], ["torch", "numpy"]),
        (["extend", "new", "--base", "base", "--out", "x", "--recipe", "soup"], ["torch", "numpy"]),
        (["extend", "new", "--base", "base", "--out", "x", "--pooler", "mean"], ["torch", "numpy"]),
        (["extend", "nowhere", "--base", "base", "--out", "x"], ["torch", "timm", "sklearn"]),
        (["check", "nowhere", "--base", "base"], ["torch", "timm", "sklearn"]),
        (["evaluate", "v2", "nowhere"], ["torch", "timm", "sklearn"]),
        (["tune", "v2", "--goal", "bst"], ["torch", "numpy"]),
        (["tune", "v9"], ["torch", "numpy"]),
    ],
)
def test_help_and_typos_are_answered_without_slow_imports(words: list[str], slow: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['branchout', *{words}]\nfrom branchout.cli import main\n"
        f"try: main()\nexcept SystemExit: print('imported', [name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr


@pytest.mark.parametrize("command", ["check", "extend", "evaluate"])
def test_all_problems_of_a_folder_are_named_without_slow_imports(command: str, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    shutil.copytree(photos / "new", folder)
    one = next(file for file in sorted(folder.rglob("*")) if file.is_file())
    shutil.copy(one, one.with_name(f"copy{one.suffix}"))
    (one.parent / "broken.jpg").write_bytes(b"")
    (folder / "bare").mkdir()
    words = ["evaluate", "v2", str(folder)] if command == "evaluate" else [command, str(folder), "--base", "base"]
    words += ["--out", "x"] if command == "extend" else []
    code = (
        f"import sys; sys.argv = ['branchout', *{words}]\nfrom branchout.cli import main\n"
        "try: main()\nexcept SystemExit: print('imported', [name for name in ('torch', 'timm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr
    for word in ("bare", "broken.jpg", f"copy{one.suffix}"):
        assert word in done.stderr


# Errors.


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BranchoutError("as it is"), "as it is"),
        (OSError(28, "No space left on device", "x/y"), "x/y: the disk is full"),
        (OSError(30, "Read-only file system"), "read-only"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "--device cpu"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            "enough memory",
        ),
    ],
)
def test_errors_of_the_machine_end_a_command_with_a_sentence(
    error: Exception, words: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(api, "load", fails)
    refused(run("predict", "glyphs", photos / "one"), words)
    answer = run("extend", photos / "new", "--base", "glyphs", "--out", tmp_path / "x", "--json")
    assert (answer.status, answer.err) == (1, "")
    last = json.loads(answer.out.splitlines()[-1])
    assert last["event"] == "error"
    assert words in last["message"]


def test_bench_out_of_gpu_memory_names_no_option_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["branchout", "bench", "sota"])
    message = explained(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert message is not None
    assert "--device" not in message
    assert "CUDA_VISIBLE_DEVICES=" in message


def test_faults_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert explained(KeyError("x")) is None

    def fails(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(api, "load", fails)
    with pytest.raises(KeyError):
        run("push", "v2", "a/b")


def test_an_output_that_is_full_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([SCRIPT, "version"], stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("the base was loaded"))
    monkeypatch.setattr(api.loading, "resolve", lambda *_, **__: pytest.fail("the data was read"))
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    for name, words in (("file/v2", "is a file"), ("dangling", "already exists"), ("v" * 300, "too long")):
        refused(run("extend", photos / "new", "--base", "glyphs", "--out", tmp_path / name), words)
        refused(run("pretrain", photos / "one", "--out", tmp_path / name), words)
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_fills_during_training_is_a_sentence_and_the_run_can_resume(
    base: api.Model, photos: Path, tmp_path: Path
) -> None:
    words = ["extend", photos / "new", "--base", base.folder, "--out", tmp_path / "v2", "--epochs", "1"]
    done = subprocess.run(
        [SCRIPT, *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    refused(Answer(done.returncode, done.stdout, done.stderr), "File too large")
    assert not (tmp_path / "v2").exists()
    assert not list(tmp_path.glob("*.partial"))
    well(run(*words))
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]


def test_two_runs_into_one_folder_are_told_apart_at_once(base: api.Model, photos: Path, tmp_path: Path) -> None:
    with working_on(tmp_path / "v2", {}):
        answer = run("extend", photos / "new", "--base", base.folder, "--out", tmp_path / "v2")
        refused(answer, "Another process is writing", str(tmp_path / "v2"))


def test_settings_of_a_stopped_run_that_are_damaged_are_a_sentence(
    base: api.Model, photos: Path, tmp_path: Path
) -> None:
    work = work_folder(tmp_path / "v2")
    work.mkdir()
    (work / "request.json").write_text('{"seed": ')
    answer = run("extend", photos / "new", "--base", base.folder, "--out", tmp_path / "v2")
    refused(answer, "request.json is not valid JSON", f"delete {work}")


def test_devices(base: api.Model, photos: Path, tmp_path: Path) -> None:
    file = next((photos / "one" / BASE[0]).iterdir())
    assert well(run("predict", base.folder, file, "--device", "cpu")).startswith(f"{file}: ")
    for name in ("tpu", "cuda:99", "mps", ""):
        refused(run("predict", base.folder, file, "--device", name), f"There is no device {name!r}", "cpu")
    with pytest.raises(BranchoutError, match="There is no device 'meta'"):
        api.load(base.folder, device=torch.device("meta"))
    refused(run("pretrain", photos / "one", "--out", tmp_path / "x", "--device", "tpu"), "There is no device")


# Printing.


@pytest.fixture(scope="module")
def hostile(base: api.Model, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hostile") / "v2"
    well(run("extend", photos / "new", "--base", base.folder, "--out", out, "--epochs", "1"))
    return out


def test_names_cannot_send_escape_sequences(hostile: Path, base: api.Model, photos: Path) -> None:
    model = api.load(hostile)
    model.tune("novel")
    asked = photos / "new" / HOSTILE
    outputs = [
        run("predict", hostile, asked, "--top", "20"),
        run("explain", hostile, asked, "--memory", photos / "new", "--top", "20"),
        run("evaluate", hostile, photos / "new"),
        run("check", photos / "new", "--base", base.folder),
        run("predict", hostile, asked / "\x1b[2Jnothing.png"),
        run("predict", asked, asked),
    ]
    for answer in outputs:
        for character in "\x1b\x9b\u202e":
            assert character not in answer.out + answer.err
    for number in (0, 1):
        assert r"red \x1b[31m \x9b2J \u202e bird" in outputs[number].out
    lines = run("predict", hostile, asked, "--top", "20", "--json").out
    assert {*BASE} < {each["class"] for each in json.loads(lines.splitlines()[0])["answers"]}


def test_json_lines_hold_names_as_they_are_and_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"class": HOSTILE, "file": "\udcff"})
    line = capsys.readouterr().out
    assert not set("\x1b\x9b\u202e") & set(line)
    assert json.loads(line) == {"class": HOSTILE, "file": "\udcff"}


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("--minutes", "ten", "a number"), ("--epochs", "1.5", "a whole number"), ("--epochs", "0", "at least 1")],
)
def test_a_value_of_the_wrong_kind_is_answered_plainly(option: str, value: str, expected: str) -> None:
    answer = run("extend", "new", "--base", "glyphs", "--out", "v2", option, value)
    assert answer.status == 2
    assert f"'{option}': expected {expected}, found '{value}'" in answer.err


def test_json_lines_hold_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "deep": [{"accuracy": float("inf")}, 0.5]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "deep": [{"accuracy": None}, 0.5]}


# pretrain


def test_pretrain_with_one_image_of_each_class_saves_the_model(photos: Path, tmp_path: Path) -> None:
    words = ["--width", "8", "--size", "32", "--epochs", "2", "--device", "cpu", "--out", tmp_path / "base"]
    told = well(typed("pretrain", photos / "one", *words))
    assert f"{len(BASE)} classes, no validation images" in told
    model = api.load(tmp_path / "base")
    assert model.classes == BASE
    assert "accuracy" not in model.saved.history[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
