"""The progress of long work: what is reported, and to whom. It imports nothing slow."""

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


Report = Callable[[Event], None]


def silent(_: Event) -> None:
    """Report to nobody."""


def both(one: Report, other: Report) -> Report:
    """Report to both."""

    def report(event: Event) -> None:
        one(event)
        other(event)

    return report
