"""What is shown while a command works."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from branchout.cli import display
from branchout.cli.display import progress
from branchout.training.loop import Event


@pytest.mark.parametrize("terminal", [False, True])
def test_what_the_package_logs_is_printed_once_beside_the_progress(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    log = logging.getLogger("branchout.training.cuda_graphs")
    with progress(console) as on_progress:
        on_progress(Event("Training", 1, 1, {"loss": 0.5}))
        log.info("No CUDA graph: [20 steps] are too few.")
    log.info("said when nobody listens")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("No CUDA graph: [20 steps] are too few.") == 1
    assert "Training" in shown
    assert "nobody" not in shown


def test_a_log_file_has_the_end_of_work_that_it_has_the_beginning_of(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(console) as on_progress:
        for at, done in ((0, 10), (20, 50), (40, 90), (41, 100)):  # long work
            clock[0] = at
            on_progress(Event("Computing", done, 100))
        for at, done in ((100, 1), (101, 8), (102, 8), (103, 8)):  # the same, quickly done with other images
            clock[0] = at
            on_progress(Event("Computing", done, 8))
    assert console.file.getvalue().split("\n") == ["Computing 90/100", "Computing 100/100", ""]  # type: ignore[attr-defined]
