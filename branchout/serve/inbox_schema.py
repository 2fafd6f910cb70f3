"""What the routes of the inbox accept and return."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from branchout.inbox.folder import Decision
from branchout.inbox.groups import SeenPhoto
from branchout.inbox.runs import Result
from branchout.serve.schema import Shape, Work

MOST_PHOTOS = 500
"""Of one decision: more do not fit into a request of `Limits.json_bytes`."""


class Choice(Shape):
    photos: list[Annotated[str, Field(pattern="^[0-9a-f]{16}$")]] = Field(min_length=1, max_length=MOST_PHOTOS)
    action: Literal["name", "dismiss", "undo"]
    name: str | None = Field(None, max_length=1000, alias="class", description="The class, for the action name.")
    new_class: bool = Field(False, description="Add the class although one of a similar name exists.")
    when: str | None = Field(
        None,
        max_length=100,
        description="For the action undo: refused if they were decided about at another time.",
    )


class NewRun(Shape):
    out: str | None = Field(None, max_length=100, description="The new model's name; v3 if v2 is extended.")


class FalseAlarms(Shape):
    share: float = Field(gt=0, lt=1, description="The share of known images that may count as unknown, such as 0.2.")


class RunAction(Shape):
    action: Literal["resume", "stop", "accept", "discard"]


class DecidedClass(Shape):
    name: str = Field(alias="class")
    known: bool = Field(description="Whether the model knows this class already.")
    missing: int = Field(description="How many photos it still needs before it can be taught.")
    photos: list[Decision]


class RunInfo(Shape):
    number: int
    state: str = Field(description="running, stopped, failed or finished.")
    out: str
    classes: dict[str, int]
    works: list[Work]
    result: Result | None
    verdict: str | None = Field(description="Whether old classes got worse.")
    error: str | None


class LastDecision(Shape):
    photos: list[str]
    name: str | None = Field(alias="class", description="The class; null if they were dismissed.")
    when: str


class InboxInfo(Shape):
    state: str = Field(description="starting, ready or failed.")
    work: str = Field(description="What is being done, such as looking at new photos.")
    error: str | None
    folder: str
    model: str
    threshold: float | None
    known_images: int
    false_alarms: float | None = Field(
        description="The share of known images above the threshold; null if it was given."
    )
    groups: list[list[SeenPhoto]] = Field(description="Undecided photos that fit no class, grouped by look.")
    fitting: list[SeenPhoto] = Field(description="Undecided photos that fit a class.")
    decided: list[DecidedClass]
    dismissed: list[Decision]
    last: LastDecision | None = Field(description="What was decided last and can be undone.")
    notes: list[str] = Field(description="Old classes of which no images are kept for the next run.")
    taught: int
    unreadable: dict[str, str]
    next: str = Field(description="A free name for the next model.")
    run: RunInfo | None
