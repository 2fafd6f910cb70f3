"""What was found about the photos of an inbox, as it is kept in its folder. This needs no network."""

from __future__ import annotations

from pydantic import BaseModel

from branchout.errors import BranchoutError
from branchout.files import write_json
from branchout.inbox.folder import Inbox, read_as

GROUPS = "groups.json"


class SeenPhoto(BaseModel):
    """What the model says of one photo."""

    photo: str
    file: str
    score: float
    """Larger: less like the known classes. Above the threshold the photo counts as unknown."""
    answer: str
    probability: float


class Analysis(BaseModel):
    """What the model says of all photos."""

    threshold: float
    known_images: int
    """How many images of known classes set the threshold; 0 if it was given."""
    false_alarms: float | None = None
    """The share of these images above the threshold."""
    photos: list[SeenPhoto]
    groups: list[list[str]]
    """Photos that fit no class, by their ids; the largest group first."""
    unreadable: dict[str, str] = {}
    """Files that cannot be decoded, and why."""
    classes: list[str] = []
    """The classes of the model."""

    @property
    def fitting(self) -> list[SeenPhoto]:
        """Photos that fit a known class, the least certain first."""
        unknown = {photo for members in self.groups for photo in members}
        return sorted((p for p in self.photos if p.photo not in unknown), key=lambda p: -p.score)

    def save(self, inbox: Inbox) -> None:
        write_json(inbox.state / GROUPS, self.model_dump())


def has_list(inbox: Inbox) -> bool:
    return (inbox.state / GROUPS).exists()


def listed(inbox: Inbox) -> Analysis:
    """The analysis that was saved last."""
    if not has_list(inbox):
        raise BranchoutError(f"The photos have no groups yet. Type: branchout inbox {inbox.folder} --model MODEL")
    return read_as(Analysis, inbox.state / GROUPS)
