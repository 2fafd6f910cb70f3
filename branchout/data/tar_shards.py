"""WebDataset shards: tar archives whose members `key.jpg` and `key.cls` are an image and its class.

Nothing is unpacked: images are read from their place in the archive. Members that are no regular files are refused.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from branchout.data.decode import Kind
from branchout.data.problems import Problems
from branchout.data.samples import Samples
from branchout.data.verify import IMAGE_SUFFIXES, FilePixels, ImageFile, Member
from branchout.errors import BranchoutError, canonical, printable, some
from branchout.files import open_regular

LABELS = (".cls", ".json", ".txt")
"""Members that name the class of an image, the first one first."""
JSON_KEYS = ("class_name", "class", "label_name", "label", "cls")
CLASS_LIST = "classes.txt"
"""Beside the shards: class names, one in each line, for `.cls` members that hold numbers."""
LARGEST_LABEL = 2**16
LARGEST_IMAGE = 2**29
"""Larger members are refused."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def are_shards(place: Path) -> bool:
    """Whether a path names tar shards: an archive, a range such as `shards-{000..010}.tar`, or a folder of archives.

    A folder that also holds folders or images is none: the archive in it may be a backup.
    """
    if place.suffix == ".tar" and not place.is_dir():
        return True
    if not place.is_dir():
        return False
    with os.scandir(place) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    others = any(_is_image(entry.name) or entry.is_dir() for entry in found)
    return not others and any(entry.name.endswith(".tar") for entry in found)


def members(place: Path) -> list[ImageFile]:
    """All images in the shards, labelled or not. A shard that cannot be read to its end is an error."""
    problems = Problems()
    found: list[ImageFile] = [
        member for shard in _shards(place) for member in _regular(shard, problems) if _is_image(member.name)
    ]
    damaged = [*problems.of(Kind.TRUNCATED), *problems.of(Kind.UNREADABLE)]
    if damaged:
        raise BranchoutError(
            f"{len(damaged):,} archive{'' if len(damaged) == 1 else 's'} of {printable(place)} cannot be read, such as "
            f"{damaged[0]}. Copy or pack it again, or leave it out"
        )
    if not found:
        raise BranchoutError(f"{printable(place)} contains no images")
    return found


def list_images(place: Path, problems: Problems) -> Samples:
    """All labelled images, none decoded yet."""
    shards = _shards(place)
    root = shards[0].parent
    numbered = _class_list(root)
    paths, spans, names, ids = [], [], [], []
    for shard in shards:
        labels: dict[str, tuple[int, str]] = {}
        images = []
        for member in _regular(shard, problems):
            key, suffix = _key(member.name), PurePosixPath(member.name).suffix.lower()
            if _is_image(member.name):
                images.append(member)
            elif suffix in LABELS:
                label = _label(member, suffix)
                if label:
                    labels[key] = min(labels.get(key, (len(LABELS), "")), (LABELS.index(suffix), label))
            else:
                problems.add(Kind.COMPANION, f"{shard.name}/{member.name}")
        for member in images:
            _, label = labels.get(_key(member.name), (0, ""))
            if not label:
                problems.add(Kind.UNLABELLED, f"{shard.name}/{member.name}")
                continue
            paths.append(os.fsencode(shard.name))
            spans.append((member.start, member.size))
            names.append(_class_name(label, numbered, shard))
            ids.append(printable(f"{shard.name}/{member.name}"))
    if not names:
        raise BranchoutError(
            f"{printable(place)} contains no labelled images. Expected tar archives with members such as one.jpg and "
            "one.cls, where one.cls holds the name of the class" + "".join(f"\n  {line}" for line in problems.summary())
        )
    pixels = FilePixels(root, np.array(paths), np.array(spans, dtype=np.int64))
    return Samples.build(pixels, names, ids)


def _shards(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(path for path in place.iterdir() if path.suffix == ".tar" and not path.name.startswith("."))
    span = _RANGE.search(place.name)
    names = [place.name]
    if span:
        first, last = span.groups()
        numbers = range(int(first), int(last) + 1)
        names = [place.name.replace(span[0], f"{number:0{len(first)}d}") for number in numbers]
    shards = [place.with_name(name) for name in names]
    missing = [shard for shard in shards if not shard.is_file()]
    if missing or not shards:
        found = "there is no such file" if shards else "no shard"
        if len(shards) > 1:
            found = f"{len(missing):,} of {len(shards):,} shards do not exist, such as {missing[0]}"
        raise BranchoutError(f"{printable(place)}: {printable(found)}. Expected names such as shards-{{000..010}}.tar")
    return shards


def _regular(shard: Path, problems: Problems) -> Iterator[Member]:
    """The regular files in an archive, in its order; what else is in it, and where it ends too early, is reported."""
    try:
        with open_regular(shard) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                vars(archive)["members"].clear()  # it would keep an object for each
                if member.size < 0:  # it would lead back to where the archive was read before
                    raise tarfile.ReadError(f"a member of {member.size:,} bytes")
                path = f"{shard.name}/{member.name}"
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    problems.add(Kind.NOT_AN_IMAGE, path, "a link or special file in an archive")
                elif member.name.startswith("/") or ".." in member.name.split("/"):
                    problems.add(Kind.NOT_AN_IMAGE, path, "its name leads out of the archive")
                elif member.size > LARGEST_IMAGE:
                    problems.add(Kind.TOO_LARGE, path, f"{member.size:,} bytes")
                elif not PurePosixPath(member.name).name.startswith("."):
                    yield Member(shard, member.name, member.offset_data, member.size)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise tarfile.ReadError(f"damaged at byte {archive.offset:,}; what follows was not read")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        problems.add(Kind.TRUNCATED, shard.name, f"not a complete, uncompressed tar archive: {error}")
    except OSError as error:
        problems.add(Kind.UNREADABLE, shard.name, error.strerror or str(error))


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _key(name: str) -> str:
    """A member's path up to the first dot of its file name."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def _label(member: Member, suffix: str) -> str | None:
    """The class that a member names; None if it names none."""
    if member.size > LARGEST_LABEL:
        return None
    try:
        text = member.open_image().read().decode("utf-8").strip()
        if suffix == ".json":
            content = json.loads(text)
            found = (
                next((content[key] for key in JSON_KEYS if key in content), None) if isinstance(content, dict) else None
            )
            text = str(found).strip() if isinstance(found, str | int) else ""
    except (ValueError, RecursionError, OSError):
        return None
    one_line = 0 < len(text) <= 200 and "\n" not in text
    return canonical(text) if one_line else None


def _class_list(folder: Path) -> list[str]:
    try:
        with open_regular(folder / CLASS_LIST) as file:
            lines = file.read(2**24).decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise BranchoutError(f"{printable(folder / CLASS_LIST)} cannot be read: {error}") from None
    names = [canonical(line.strip()) for line in lines]
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise BranchoutError(f"{printable(folder / CLASS_LIST)} names classes more than once: {some(repeated)}")
    return names


def _class_name(label: str, numbered: list[str], shard: Path) -> str:
    if not numbered or not label.isdecimal():
        return label
    name = "".join(numbered[int(label) :][:1])
    if not name:
        raise BranchoutError(
            f"{printable(shard)} has an image of class {label}, but line {int(label) + 1:,} of {CLASS_LIST} beside it "
            f"is missing or empty; it has {len(numbered):,} lines, for classes numbered from 0"
        )
    return name
