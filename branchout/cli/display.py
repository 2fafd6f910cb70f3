"""Progress bars, tables of accuracies, sizes and times. What is slow to import is imported when it is shown."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from branchout.cli.app import console
from branchout.goals import METRICS
from branchout.progress import Event, OnProgress, silent
from branchout.units import count, percent

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table

    from branchout.evaluate.compare import Comparison
    from branchout.method.results import Measured


QUIET_SECONDS = 30.0
"""Between two lines of a log file about the same work."""


class Notes(logging.Handler):
    """Prints what the package logs, such as a choice and its reason, above the bars."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def notes_on(console: Console) -> Iterator[None]:
    log, handler = logging.getLogger("branchout"), Notes(console)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def progress(console: Console = console, *, quiet: bool = False) -> Iterator[OnProgress]:
    """Show progress: on a terminal a bar for each piece of work, in a log file a line every half minute.

    If `quiet`, nothing is shown: the output is for a program.
    """
    if quiet:
        yield silent
        return
    with notes_on(console), _bars(console) if console.is_terminal else nullcontext(_lines(console)) as on_progress:
        yield on_progress


@contextmanager
def _bars(console: Console) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    roomy = console.width >= 84
    columns = [
        TextColumn("{task.description:<26}" if roomy else "{task.description}"),
        BarColumn(bar_width=20 if roomy else 8),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[figures]}"),
    ]
    bars = Progress(*(columns if console.width >= 60 else [columns[0], columns[2]]), console=console)
    tasks: dict[str, TaskID] = {}

    def on_progress(event: Event) -> None:
        if event.work not in tasks or event.done < bars.tasks[tasks[event.work]].completed:
            tasks[event.work] = bars.add_task(event.work, total=event.total, figures="")
        bars.update(tasks[event.work], completed=event.done, total=event.total, figures=_figures(event))

    with bars:
        yield on_progress


def _lines(console: Console) -> OnProgress:
    said: dict[str, tuple[float, Event, bool]] = {}  # when, the last event, whether a line was printed

    def on_progress(event: Event) -> None:
        now = time.monotonic()
        since, last, begun = said.get(event.work, (now, event, False))
        if event.done < last.done or (last.done >= last.total and last is not event):  # again, with other images
            since, begun = now, False
        ends = event.done >= event.total and (begun or bool(event.figures))
        speaks = ends or now - since >= QUIET_SECONDS
        said[event.work] = now if speaks else since, event, begun or speaks
        if not speaks:
            return
        line = f"{event.work} {event.done:,}/{event.total:,}  {_figures(event)}"
        console.print(line.rstrip(), highlight=False, soft_wrap=True)

    return on_progress


def _figures(event: Event) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in event.figures.items())


def new_table(
    *headings: str,
    rows: Iterable[Sequence[str | Text]] = (),
    title: str | Text | None = None,
    left: Sequence[str] = (),
) -> Table:
    """A table: text in the first column and in those of `left`, numbers in the others; without a title, no frame."""
    from rich.table import Table

    table = Table(title=title, title_justify="left") if title else Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        text = number == 0 or heading in left
        table.add_column(heading, justify="left" if text else "right", overflow="fold" if text else "ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def operating_points(measured: Measured, chosen: str) -> Table:
    """Each goal's point on the test images, with the accuracy of old classes before → after."""
    before = {name: getattr(measured.before, name, None) for name in METRICS if METRICS[name].of_old}
    shown = [name for name in METRICS if getattr(measured.after, name) is not None]
    headings = [name if before.get(name) is None else f"{name} before → after" for name in shown]
    table = new_table("goal", *headings, title=f"accuracy in % on {count(measured.images, 'held-out test image')}")
    rows = {goal: result.test for goal, result in measured.goals.items()}
    rows.setdefault(chosen, measured.after)
    for goal, figures in rows.items():
        cells = []
        for name in shown:
            arrow = "" if before.get(name) is None else f"{percent(before[name])} → "
            cells.append(arrow + percent(getattr(figures, name)))
        table.add_row(f"[bold]{goal} ◂[/]" if goal == chosen else goal, *cells)
    table.add_section()
    table.add_row("images", *(_number(measured.parts.get(name)) for name in shown))
    return table


def _number(images: int | None) -> str:
    """A number of images; nothing for a mean of several parts."""
    return "" if images is None else f"{images:,}"


def before_after(found: Comparison, images: str) -> Table:
    """Accuracies of one evaluation; with several steps also those of each step's own classes."""
    before, after, counts = found.before, found.after, found.parts
    steps = len(after.steps)
    headings = ("accuracy",) if before is None else (f"before step {steps}", "after")
    table = new_table("classes", "images", *headings, title=Text(f"accuracy in % on {images}"))
    table.min_width = 36

    def add(name: str, now: float | None, was: float | None) -> None:
        if now is not None:
            counted = _number(counts.get(name.strip()))
            table.add_row(name, counted, *([] if before is None else [percent(was)]), percent(now))

    for name in METRICS:
        # Before is over old classes alone, so only the parts it knew are the same images on both sides.
        same = before is not None and METRICS[name].of_old
        add(name, getattr(after, name), getattr(before, name) if same else None)
        if name == "novel" and steps > 1:
            for number, now in enumerate(after.steps):
                add(f"  step {number + 1}", now, None if before is None else before.steps[number])
    return table


def forgotten(found: Comparison) -> Table:
    """The ten classes whose accuracy fell most."""
    losses = [row for row in found.classes() if row.before is not None and row.after < row.before]
    rows = [(Text(row.name), str(row.images), percent(row.before), percent(row.after)) for row in losses[:10]]
    return new_table(
        "class", "images", "before", "after", rows=rows, title="classes that lost accuracy, largest loss first"
    )
