"""What is shown while a command works."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from branchout.cli.display import progress
from branchout.training.loop import Event


@pytest.mark.parametrize("terminal", [False, True])
def test_what_the_package_logs_is_printed_once_beside_the_progress(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    log = logging.getLogger("branchout.training.cuda_graphs")
    with progress(console) as report:
        report(Event("Training", 1, 1, {"loss": 0.5}))
        log.info("No CUDA graph: [20 steps] are too few.")
    log.info("said when nobody listens")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("No CUDA graph: [20 steps] are too few.") == 1
    assert "Training" in shown
    assert "nobody" not in shown
