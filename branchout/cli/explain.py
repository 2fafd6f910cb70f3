"""The command `branchout explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from branchout.cli import options
from branchout.cli.app import app, check_order, console, open_model, readable, say, warn
from branchout.cli.display import new_table, progress
from branchout.cli.json_events import print_json
from branchout.errors import printable
from branchout.units import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from branchout.data.samples import Samples
    from branchout.data.verify import ImageFile
    from branchout.evaluate.explain import ClassScore, Column, Expected, Explanation


@app.command(epilog="Example: branchout explain v2/ photo.jpg --expect robin")
def explain(
    model: options.Saved,
    images: options.Pictures,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="CLASS", help="The expected class; shows why it was not predicted."),
    ] = None,
    memory: Annotated[
        list[Path] | None,
        typer.Option(
            "--memory",
            metavar="DIR",
            help="Labelled images: name those with the nearest features. May be given several times.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to show for each branch.")] = 3,
    nearest: Annotated[int, typer.Option(min=1, help="Number of nearest images of --memory to show.")] = 5,
    classes_from: options.ClassesFrom = None,
    as_json: options.AsJson = False,
    device: options.Device = None,
) -> None:
    """Explain a prediction: each branch's own logits, and what other branches and the dial add to them."""
    from branchout.data.folders import images_in

    check_order(model, images)
    files = [file for given in images for file in images_in(given)]
    loaded = open_model(model, device=device)
    album = _labelled(memory, classes_from, to_stderr=as_json) if memory else None
    read: list[ImageFile] = []
    pixels = (read.append(file) or image for file, image in readable(files))  # type: ignore[func-returns-value]
    with progress(quiet=as_json) as on_progress:
        found = loaded.explain(pixels, top=top, expect=expect, memory=album, nearest=nearest, on_progress=on_progress)
    has_dial = bool(loaded.saved.step_points) and loaded.frontier.kind == "dial"
    for file, explanation in zip(read, found, strict=True):
        if as_json:
            print_json({"file": printable(file), **explanation.to_dict()})
        else:
            _show(printable(file), explanation, None if album is None else len(album), has_dial=has_dial)


def _labelled(folders: list[Path], classes_from: str | None, *, to_stderr: bool) -> Samples:
    """The labelled images of all folders, each named by its whole path."""
    from dataclasses import replace

    import numpy as np

    from branchout import api
    from branchout.data.samples import concatenate

    problems: list[str] = []
    tables = []
    for folder in folders:
        samples = api.samples_in(folder, problems, classes_from=classes_from)
        tables.append(replace(samples, ids=np.array([str(folder / name) for name in samples.ids])))
    warn(problems, error=to_stderr)
    return concatenate(tables)


def _show(file: str, why: Explanation, images: int | None, *, has_dial: bool) -> None:
    """One image's prediction in words and one table."""
    from branchout.labels import branch_name

    winner, several = why.winner, len(why.branches) > 1
    say(f"{file}: {winner.name}, {100 * winner.probability:.1f}%" + (f" (class of {why.known})" if several else ""))
    if why.before:
        name, probability = why.before
        say(f"before {branch_name(len(why.branches) - 1)} the prediction was: {name}, {100 * probability:.1f}%")
    expected = None if why.expected is None or why.expected.place == 1 else why.expected
    shown = [*why.answers, *([] if expected is None or expected.place <= len(why.answers) else [expected.score])]
    console.print(_sums(why, shown))
    if several:
        for number, best in enumerate(why.branches):
            say(f"{branch_name(number)} on its own: {', '.join(f'{name} {value:.2f}' for name, value in best)}")
    rival = expected.score if expected else why.answers[1] if len(why.answers) > 1 else None
    if rival is not None:
        first, second = (_shown_parts(score) for score in (winner, rival))
        own, delta, dial = (one - other for one, other in zip(first, second, strict=True))
        parts = f": own logits {own:+.2f}, other branches {delta:+.2f}, dial {dial:+.2f}" if several else ""
        say(f"{winner.name} leads {rival.name} by {own + delta + dial:.2f}{parts}")
    if why.expected is not None:
        say(_why_not(why.expected, winner.name, has_dial))
    if why.own_answer != winner.name:
        say(f"prediction from the branches' own logits alone: {why.own_answer}")
    if why.without_dial not in (winner.name, why.own_answer):
        say(f"prediction without the dial: {why.without_dial}")
    if images is not None:
        listed = "\n  ".join(f"{n.cosine:.3f}  {n.name}: {n.file}" for n in why.nearest)
        among = f"{count(images, 'image')} to {branch_name(winner.branch)}"
        say(f"nearest of {among}, by the cosine of features:\n  {listed}")


def _why_not(expected: Expected, winner: str, has_dial: bool) -> str:
    """Where an expected class stands, and what the dial would change."""
    name = expected.score.name
    if expected.place == 1:
        return f"{name} is predicted, as expected"
    said = f"{name} is ranked {expected.place:,} with {100 * expected.score.probability:.1f}%"
    if not has_dial:
        return said
    if expected.dial_change is None:
        return f"{said}; no position of the dial makes it win"
    more = "higher" if expected.dial_change > 0 else "lower"
    return f"{said}; with the dial more than {abs(expected.dial_change):.2f} {more} it would win over {winner}"


def _sums(why: Explanation, scores: Sequence[ClassScore]) -> Table:
    """How the best classes' logits come about. Parts are rounded first and then added, so what is shown adds up."""
    from branchout.labels import branch_name

    pools = any(len(score.columns) > 1 for score in scores)
    several = len(why.branches) > 1
    sums = ["branch", "own logit", "+ other branches", "+ dial", "= logit"]
    headings = ["class", *(sums if several else ["logit"])]
    title = "logits of the most probable classes" if several else None
    table = new_table(*headings, *(["pooled"] if pools else []), title=title, left=("branch", "pooled"))
    for score in scores:
        for number, column in enumerate(score.columns):
            parts = _rounded(column)
            cells = [Text(score.name if number == 0 else "", "bold" if score is why.winner else "")]
            if several:
                cells += [Text(branch_name(column.branch)), Text(f"{parts[0]:.2f}")]
                cells += [Text(f"{part:+.2f}" if part else "") for part in parts[1:]]
            cells.append(Text(f"{sum(parts):.2f}"))
            if pools:
                cells.append(Text(_pooled(why.pooler, column.counts, score.logit, len(score.columns))))
            table.add_row(*cells)
    return table


def _rounded(column: Column) -> list[float]:
    return [round(part, 2) for part in (column.own, column.delta, column.dial)]


def _shown_parts(score: ClassScore) -> list[float]:
    """The parts of what was pooled, as the table shows them."""
    used = [_rounded(column) for column in score.columns if column.counts]
    return [sum(part) / len(used) for part in zip(*used, strict=True)]


def _pooled(pooler: str, counts: bool, logit: float, columns: int) -> str:
    if columns == 1:
        return ""
    if pooler == "max":
        return "◂ max" if counts else ""
    return f"mean {logit:.2f}"
