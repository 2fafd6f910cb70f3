"""The progress of long work: what callbacks are called with. It imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Progress of a piece of work: how many of its images or epochs are done, and numbers such as the loss."""

    work: str
    done: int
    total: int
    figures: dict[str, float] = field(default_factory=dict)


OnProgress = Callable[[Event], None]
"""Called with each event of some work."""


def silent(_: Event) -> None:
    """Ignores all progress."""


def both(one: OnProgress, other: OnProgress) -> OnProgress:
    """Calls both."""

    def on_progress(event: Event) -> None:
        one(event)
        other(event)

    return on_progress
