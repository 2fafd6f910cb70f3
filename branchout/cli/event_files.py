"""TensorBoard event files: every figure that a training reports, as a curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from branchout.errors import BranchoutError
from branchout.training.loop import Event, Report, silent


def check(folder: Path | None) -> None:
    """Whether event files can be written to `folder`, asked before anything is trained."""
    if folder is None:
        return
    if find_spec("tensorboard") is None:
        raise BranchoutError(
            'for --tensorboard, tensorboard must be installed; type: pip install "branchout[tensorboard]"'
        )
    if folder.exists() and not folder.is_dir():
        raise BranchoutError(f"event files go into a folder, and {folder} is a file; name another for --tensorboard")


@contextmanager
def event_files(folder: Path | None) -> Iterator[Report]:
    """A report that writes figures into event files in `folder`; without one, a report that nobody hears."""
    if folder is None:
        yield silent
        return
    check(folder)
    from torch.utils.tensorboard import SummaryWriter

    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise BranchoutError(f"event files cannot be written to {folder}: {error}") from None

    def report(event: Event) -> None:
        for name, value in event.figures.items():
            tag = f"{event.work}/{name}".replace(" ", "_")  # TensorBoard would do so too, and say it
            writer.add_scalar(tag, value, event.done)

    try:
        yield report
    finally:
        writer.close()


def goals(measured: Mapping[str, Any] | None) -> Iterator[Event]:
    """The accuracies of every operating point that an extension measured, as events of their own."""
    for goal, figures in (measured or {}).get("goals", {}).items():
        yield Event(f"goal {goal}", 1, 1, {name: value for name, value in figures.items() if isinstance(value, float)})


def both(one: Report, other: Report) -> Report:
    """Two who watch the same work."""

    def report(event: Event) -> None:
        one(event)
        other(event)

    return report
