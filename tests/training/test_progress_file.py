"""The file that a running extension leaves for watchers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import BASE, NEW, exemplars

from branchout import api
from branchout.data.samples import Samples
from branchout.training import progress_file as progress
from branchout.training.loop import Event, silent
from branchout.training.progress_file import NOTE, recorded


def note(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / NOTE).read_text(encoding="utf-8"))
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)


@pytest.mark.usefixtures("eager")
def test_it_tells_how_far_each_work_is_the_latest_last(tmp_path: Path) -> None:
    heard: list[Event] = []
    with recorded(tmp_path, heard.append) as on_progress:
        assert note(tmp_path)["works"] == []
        on_progress(Event("branch", 1, 3, {"loss": 0.5}))
        first = note(tmp_path)["works"][0]["since"]
        on_progress(Event("features", 5, 9))
        on_progress(Event("branch", 2, 3, {"loss": 0.25}))
        found = note(tmp_path)
        assert [(w["work"], w["done"], w["total"]) for w in found["works"]] == [("features", 5, 9), ("branch", 2, 3)]
        assert found["works"][1]["figures"] == {"loss": 0.25}
        assert [w["losses"] for w in found["works"]] == [[], [0.5, 0.25]]
        assert found["works"][1]["since"] == first
        assert (found["state"], found["pid"]) == ("running", os.getpid())
        on_progress(Event("features", 1, 9))  # anew
        again = note(tmp_path)["works"][-1]
        assert (again["work"], again["done"]) == ("features", 1)
        assert again["since"] >= found["updated"]
        on_progress(Event("branch", 1, 3, {"loss": 2.0}))
        assert note(tmp_path)["works"][-1]["losses"] == [2.0]
    assert note(tmp_path)["state"] == "saving"
    assert [event.work for event in heard] == ["branch", "features", "branch", "features", "branch"]
    assert [path.name for path in tmp_path.iterdir()] == [NOTE]  # nothing half written is left


def test_it_is_not_written_at_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    seen = set()
    with recorded(tmp_path, silent) as on_progress:
        for n in range(1, 101):
            now[0] += 0.02
            on_progress(Event("branch", n, 100))
            seen.add((tmp_path / NOTE).read_text(encoding="utf-8"))
    assert 3 <= len(seen) <= 5  # in two seconds


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_is_stopped_says_so(tmp_path: Path, error: type[BaseException]) -> None:
    def stopped() -> None:
        with recorded(tmp_path, silent) as on_progress:
            on_progress(Event("branch", 1, 3))
            raise error

    with pytest.raises(error):
        stopped()
    found = note(tmp_path)
    assert found["state"] == "stopped"
    assert found["works"][0]["done"] == 1


def test_a_disk_that_takes_nothing_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a folder cannot be made below it")
    with recorded(tmp_path / "file" / "work", silent) as on_progress:
        on_progress(Event("branch", 1, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_folder_it_is_the_same_report() -> None:
    with recorded(None, silent) as on_progress:
        assert on_progress is silent


@pytest.mark.usefixtures("eager")
def test_an_extension_can_be_watched_from_its_first_epoch_to_its_end(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With features that another test has left, nothing would be told after the last epoch.
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "v2"
    seen: list[dict[str, Any]] = []
    base.extend(
        train.of_classes(NEW),
        memory=exemplars(train),
        val=val.of_classes([*BASE, *NEW]),
        out=out,
        epochs=2,
        on_progress=lambda _: seen.append(note(api.work_folder(out))),
    )
    works = {(work["work"], work["done"], work["total"]) for each in seen for work in each["works"]}
    assert {("Training the new branch", 1, 2), ("Training the new branch", 2, 2)} <= works
    assert {each["state"] for each in seen} == {"running"}
    assert not api.work_folder(out).exists()
