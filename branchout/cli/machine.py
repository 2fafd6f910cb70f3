"""For programs that run a command and read along: one JSON object a line instead of bars and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from branchout.api import Model
    from branchout.training.loop import Event


def emit(event: str, **facts: Any) -> None:
    """One event, at once: whoever reads must not wait for a buffer to fill."""
    print(json.dumps({"event": event, **facts}, ensure_ascii=False), flush=True)


def emit_progress(event: Event) -> None:
    emit("progress", **asdict(event))


@contextmanager
def errors_as_events(as_json: bool) -> Iterator[None]:
    """With `as_json`, an error that a user can mend is the last event, and the exit status is 1 as ever."""
    try:
        yield
    except BranchoutError as error:
        if not as_json:
            raise
        emit("error", message=str(error))
        raise typer.Exit(1) from None


def extension(model: Model, out: Path) -> dict[str, Any]:
    """All that an extension came to: where it is, what was counted, and every operating point."""
    made = model.saved.history[-1]
    space = model.classifier.space
    measured = made["measured"] or {}
    return {
        "model": str(out),
        "card": str(out / "README.md"),
        "classes": len(space.classes),
        "new_classes": len(space.classes) - len(space.upto(len(space.branches) - 2).classes),
        "overlapping_classes": len(space.overlap),
        "images": made["images"],
        "exemplars": made["exemplars kept"],
        "parameters": model.classifier.parameter_counts(),
        "goal": made["goal"],
        "chosen_on": made["chosen on"],
        "measured_on": measured.get("images", 0),
        "before": measured.get("before") or None,
        "after": measured.get("after"),
        "operating_points": measured.get("goals", {}),
        "seconds": made["seconds"],
    }
