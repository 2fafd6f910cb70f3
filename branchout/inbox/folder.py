"""The inbox on disk: photos in a folder, and beside them one small JSON file for every decision about a photo.

    photos/IMG_1.jpg                            a photo; it is never moved or changed
    photos/.inbox/decisions/0f3a….json          its class, or that it was dismissed
    photos/.inbox/groups.json                   the groups that were listed last
    photos/.inbox/settings.json                 the share of false alarms, if it was changed
    photos/.inbox/runs/1/                       an extension with decided photos (see runs.py)

A photo is identified by its content: a copy that arrives under another name has the same decision.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from branchout.data.decode import Kind, UnreadableImage, image_size, looks_like_image
from branchout.data.verify import IMAGE_SUFFIXES
from branchout.errors import BranchoutError, printable
from branchout.files import checksum, read_json, write_json

STATE = ".inbox"
Content = TypeVar("Content", bound=BaseModel)
LONGEST_NAME = 120
"""Characters of a class name: it also names a folder."""


@dataclass(frozen=True)
class Photo:
    """One image file of the inbox."""

    id: str
    """16 hexadecimal digits: the beginning of the SHA-256 of its bytes."""
    file: str
    """Relative to the inbox, with forward slashes."""


class Decision(BaseModel):
    """What a person decided about one photo: the content of its file."""

    photo: str
    file: str
    name: str | None
    """The class of the photo; None if it was dismissed."""
    when: str


class FolderSettings(BaseModel):
    """What settings.json holds."""

    false_alarms: float | None = Field(None, gt=0, lt=1)
    """The share of known images that may count as unknown; None for the default."""


class Inbox:
    """A folder of photos and the decisions about them."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise BranchoutError(f"Folder {folder} does not exist. The inbox is a folder with new photos.")
        self.folder = folder
        self.state = folder / STATE
        self.broken: dict[str, str] = {}
        """Files that are named as images and are none, and why; as of the last call of `photos`."""
        self.copies: dict[str, list[str]] = {}
        """All files of each photo; as of the last call of `photos`."""
        self._known: dict[str, tuple[tuple[int, int], str, bool]] = {}
        self._found: dict[str, Photo] = {}

    def photos(self) -> list[Photo]:
        """Every image file below the folder, in the order of their names. Of identical files only the first."""
        broken: dict[str, str] = {}
        copies: dict[str, list[str]] = {}
        known: dict[str, tuple[tuple[int, int], str, bool]] = {}
        for path in _files(self.folder):
            file = path.relative_to(self.folder).as_posix()
            try:
                status = path.stat()
                stamp = status.st_size, status.st_mtime_ns
                before = self._known.get(file)
                known[file] = before if before and before[0] == stamp else (stamp, *_identified(path))
            except OSError as error:  # removed meanwhile, or not readable
                if path.is_symlink() and _named_as_image(path):
                    broken[file] = error.strerror or str(error)
                continue
            _, found, usable = known[file]
            if usable:
                copies.setdefault(found, []).append(file)
            elif found:
                broken[file] = found
        self._known, self.broken, self.copies = known, broken, copies
        self._found = {photo: Photo(photo, files[0]) for photo, files in copies.items()}
        return list(self._found.values())

    def find(self, photo: str) -> Photo | None:
        """The photo of an id. The folder is read again only if it was not listed before."""
        if photo not in self._found:
            self.photos()
        return self._found.get(photo)

    def path(self, photo: Photo) -> Path:
        return self.folder / photo.file

    @property
    def false_alarms(self) -> float | None:
        file = self.state / "settings.json"
        return read_as(FolderSettings, file).false_alarms if file.exists() else None

    def set_false_alarms(self, share: float) -> None:
        write_json(self.state / "settings.json", FolderSettings(false_alarms=share).model_dump())

    # Decisions.

    def decisions(self) -> dict[str, Decision]:
        """All decisions by the photo's id, in the order in which they were made."""
        found = []
        for file in (self.state / "decisions").glob("*.json"):
            try:
                found.append(read_as(Decision, file))
            except BranchoutError:
                if file.exists():  # otherwise it was undone meanwhile
                    raise
        return {each.photo: each for each in sorted(found, key=lambda each: (each.when, each.file))}

    def decide(self, photos: Iterable[Photo], name: str | None) -> None:
        """Record the class of some photos, or with None that they are dismissed. A later decision replaces it."""
        name, when = None if name is None else class_name(name), now()  # one time: they are undone together
        for photo in photos:
            decision = Decision(photo=photo.id, file=photo.file, name=name, when=when)
            write_json(self._file(photo.id), decision.model_dump())

    def undo(self, photos: Iterable[Photo]) -> None:
        """Remove the decisions about some photos."""
        for photo in photos:
            self._file(photo.id).unlink(missing_ok=True)

    def _file(self, photo: str) -> Path:
        return self.state / "decisions" / f"{photo}.json"


def read_as(kind: type[Content], file: Path) -> Content:
    """A JSON file of the inbox, checked."""
    try:
        return kind.model_validate(read_json(file))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BranchoutError(f"{file} cannot be used: {where}: {first['msg']}. Correct it or delete it.") from None


def now() -> str:
    """The time, fine enough to order decisions. Earlier versions wrote milliseconds, which are ordered rightly too."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def class_name(text: str) -> str:
    """A class name in one Unicode form, checked: it becomes the name of a folder."""
    name = unicodedata.normalize("NFC", text).strip()
    why = None
    if not name:
        why = "is empty"
    elif name.startswith(".") or "/" in name or "\\" in name:
        why = "begins with a dot or contains a slash"
    elif printable(name) != name:
        why = "contains control characters"
    elif len(name) > LONGEST_NAME or len(name.encode()) > 250:
        why = f"is longer than {LONGEST_NAME} characters"
    if why:
        raise BranchoutError(f"The class name {printable(name)[:40]!r} {why}. It must be the name of a folder.")
    return name


def similar(name: str, names: Iterable[str]) -> str | None:
    """A class that differs from a name only in case, spaces, hyphens or underscores."""
    return next((each for each in names if each != name and _letters(each) == _letters(name)), None)


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]+", "", unicodedata.normalize("NFKC", name)).casefold()


def _identified(path: Path) -> tuple[str, bool]:
    """The id of an image file and True; otherwise why a file is no image, or nothing if it was not meant as one."""
    if looks_like_image(path):
        return checksum(path)[:16], True
    try:
        image_size(path)
    except UnreadableImage as error:
        if _named_as_image(path) or error.kind is Kind.UNSUPPORTED:
            return reason(error), False
    return "", False


def reason(error: UnreadableImage) -> str:
    """Why an image cannot be used, without its name."""
    return f"{error.kind} ({error.detail})" if error.detail else str(error.kind)


def _named_as_image(path: Path) -> bool:
    return path.name.lower().endswith(IMAGE_SUFFIXES)


def _files(folder: Path) -> Iterable[Path]:
    """Files below a folder, without hidden ones. Links to folders are not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))
