"""`accelerate launch -m branchout …`: one process prints, a killed one ends the run, and the run resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import BASE, NEW, exemplars, run, well
from PIL import Image

from branchout import api
from branchout.cli import many_processes
from branchout.data.samples import Samples
from branchout.errors import BranchoutError, LostProcess
from branchout.training import processes

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]


@pytest.fixture(scope="module")
def folders(train: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for part, table in (("new", train.of_classes(NEW)), ("old", exemplars(train))):
        for number, label in enumerate(table.labels):
            place = root / part / table.classes[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(table.read(number).squeeze()).save(place / f"{number}.png")
    return root


def start(count: int, *words: object) -> subprocess.Popen[str]:
    command = [*LAUNCH, "--num_processes", str(count), "--main_process_port", "0", "-m", "branchout", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_ends_the_run_and_one_process_resumes_it(
    base: api.Model, folders: Path, tmp_path: Path
) -> None:
    out, checkpoint = tmp_path / "v2", tmp_path / ".v2.work" / "branch.safetensors"
    words = ["extend", folders / "new", "--base", base.folder, "--memory", folders / "old", "--out", out]
    words += ["--device", "cpu", "--epochs", "60", "--json"]
    running = start(2, *words)
    while not checkpoint.exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    children = psutil.Process(running.pid).children()
    (second,) = [each for each in children if each.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGKILL)
    said, errors = running.communicate(timeout=100)
    assert running.returncode != 0
    assert "run the same command again" in (said + errors).lower()
    progress = [line for line in said.splitlines() if '"progress"' in line]
    assert len(progress) == len(set(progress)) > 0  # each once, although two processes ran
    assert not out.exists()

    well(run(*words))
    assert not checkpoint.exists()
    grown = api.load(out)
    assert set(grown.classes) == {*BASE, *NEW}
    assert len(grown.saved.history[-1]["losses"]) == 60


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(many_processes, "SECONDS_TO_END", 0.2)
    monkeypatch.setattr(processes, "_launch", processes.Launch())  # restored afterwards, whatever begins meanwhile
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("second_of_two")
def test_only_the_first_process_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with many_processes.one_prints("extend"):
        print("progress")
        print("a warning", file=sys.stderr)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("second_of_two")
def test_a_command_of_one_process_is_refused() -> None:
    with (
        pytest.raises(BranchoutError, match=r"branchout predict.*one process.*extend"),
        many_processes.one_prints("predict"),
    ):
        raise AssertionError("it ran")


@pytest.mark.usefixtures("second_of_two")
def test_an_error_waits_for_that_of_the_first_process_but_not_for_one_that_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(many_processes.time, "sleep", waited.append)
    for error in (BranchoutError("no such folder"), LostProcess("it has ended")):
        many_processes.let_first_speak(error)
    assert waited == [many_processes.SECONDS_TO_END, 0]
    assert "process 1" in capsys.readouterr().err
