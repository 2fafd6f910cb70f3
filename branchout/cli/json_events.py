"""Output for programs: one JSON object per line instead of progress bars and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from branchout.cli import many_processes
from branchout.cli.app import explained
from branchout.errors import printable
from branchout.progress import Event

if TYPE_CHECKING:
    from branchout.api import Model


def print_json(content: dict[str, object]) -> None:
    """One line, at once. Control characters in names are escaped, and NaN and infinite numbers become null."""
    text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False)
    print("".join(c if printable(c) == c else f"\\u{ord(c):04x}" for c in text), flush=True)


def _finite(content: object) -> object:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def emit(event: str, **content: object) -> None:
    print_json({"event": event, **content})


def emit_progress(event: Event) -> None:
    emit("progress", **asdict(event))


@contextmanager
def errors_as_events(as_json: bool) -> Iterator[None]:
    """With `as_json`, an error that a user can fix is the last event; the exit status is 1 as always."""
    try:
        yield
    except Exception as error:
        message = explained(error)
        if not as_json or message is None or isinstance(error, BrokenPipeError) or many_processes.rank() > 0:
            raise
        emit("error", message=message)
        raise typer.Exit(1) from None


def emit_extension(model: Model, out: Path) -> None:
    """The result of an extension: where it is, what was counted, and every operating point."""
    assert model.outcome is not None
    event = model.saved.history[-1]
    space, measured = model.classifier.space, event["measured"] or {}
    emit(
        "result",
        model=str(out),
        card=str(out / "README.md"),
        classes=len(space.classes),
        new_classes=len(space.classes) - len(space.upto(len(space.branches) - 2).classes),
        overlapping_classes=len(space.overlap),
        images=event["images"],
        exemplars=event["exemplars kept"],
        parameters=model.classifier.parameter_counts(),
        goal=event["goal"],
        chosen_on=event["chosen on"],
        measured_on=measured.get("images", 0),
        before=measured.get("before") or None,
        after=measured.get("after"),
        operating_points=measured.get("goals", {}),
        seconds=event["seconds"],
    )
