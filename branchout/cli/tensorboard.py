"""TensorBoard event files: every number that training reports, as a curve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from branchout.errors import BranchoutError
from branchout.files import check_output
from branchout.progress import Event, OnProgress, silent

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from branchout.api import Model


def check(folder: Path | None) -> None:
    """Raise, before anything is trained, if event files cannot be written to `folder`."""
    if folder is None:
        return
    if find_spec("tensorboard") is None:
        raise BranchoutError('--tensorboard needs tensorboard. Install it: pip install "branchout[tensorboard]"')
    check_output(folder, folder=True)


@contextmanager
def event_files(folder: Path | None) -> Iterator[OnProgress]:
    """A callback that writes event files into `folder`; without one it does nothing."""
    if folder is None:
        yield silent
        return
    check(folder)
    with ExitStack() as opened:
        writers: list[SummaryWriter] = []  # made when there is something to write

        def on_progress(event: Event) -> None:
            from torch.utils.tensorboard import SummaryWriter

            if event.figures and not writers:
                writers.append(opened.enter_context(SummaryWriter(str(folder))))
            for name, value in event.figures.items():
                tag = f"{event.work}/{name}".replace(" ", "_")  # TensorBoard would do so too, with a warning
                writers[0].add_scalar(tag, value, event.done)

        yield on_progress


def write_goals(model: Model, write: OnProgress) -> None:
    """Write the accuracies of every operating point that an extension measured, as events of their own."""
    assert model.outcome is not None
    measured = model.outcome.measured
    for goal, result in ({} if measured is None else measured.goals).items():
        figures = {name: value for name, value in asdict(result.test).items() if isinstance(value, float)}
        write(Event(f"goal {goal}", 1, 1, figures))
