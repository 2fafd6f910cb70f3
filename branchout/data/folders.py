"""Folders of images as people have them: `DIR/<class>/…/<image>`, with every flaw counted and none of them fatal."""

from __future__ import annotations

import errno
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from branchout.data.decode import MAX_PIXELS, Kind, UnreadableImage, decode, looks_like_image, measure
from branchout.data.problems import Problems
from branchout.data.samples import Image, Ints, Samples, Strings, content_hash, digest
from branchout.errors import BranchoutError, printable
from branchout.files import open_regular

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
COMPANION_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".toml", ".ini", ".db"}
    | {".html", ".htm", ".log", ".pdf", ".xlsx", ".py", ".ipynb", ".npy", ".npz", ".pkl", ".mat", ".pt", ".pth"}
    | {".zip", ".gz", ".xz", ".tar", ".md5", ".sha256", ".mp4", ".mov", ".avi"}
)
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


@dataclass(frozen=True)
class FilePixels:
    """Pixels that stay in files until they are read."""

    root: Path
    paths: Strings
    """Relative to the root, with forward slashes."""
    shapes: Ints | None = None
    """Height, width and channels of every image, where the files were verified."""
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def sizes(self) -> Ints | None:
        """Height and width of every image: n × 2."""
        return None if self.shapes is None else self.shapes[:, :2]

    @property
    def shape(self) -> tuple[int, int, int] | None:
        if self.shapes is None or not len(self) or (self.shapes != self.shapes[0]).any():
            return None
        height, width, channels = self.shapes[0].tolist()
        return height, width, channels

    def read(self, row: int) -> Image:
        return decode(self.root / self.paths[row], max_pixels=self.max_pixels)

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        return digest(*(self._stamp(str(path), portable) for path in self.paths[rows]))

    def _stamp(self, path: str, portable: bool) -> bytes:
        try:
            status = (self.root / path).stat()
            here = "" if portable else f"\0{status.st_mtime_ns}\0{status.st_ino}"
            return os.fsencode(f"{path}\0{status.st_size}{here}")
        except OSError:
            return os.fsencode(f"{path}\0missing")


Identity = tuple[int, int]
"""Device and number of a folder, whatever path led to it."""


def scan(
    root: Path,
    *,
    verify: bool = True,
    known: Collection[str] = (),
    max_pixels: int = MAX_PIXELS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Samples, Problems]:
    """All usable images below a folder of class folders, and what was wrong with the others.

    Verification decodes every file once, whatever its name. Without it files are only listed, by extension.
    `known` are classes the model already has: that two of their names differ only in case is no problem.
    `progress` is called with the number of files done and their total.
    """
    root = Path(root)
    problems = Problems()
    _require_folder(root)
    above = _above(root)
    folders = _class_folders(root, above, known, problems)
    owner = {path: name for folder, name in folders.items() for path in _walk(root, folder, above, problems)}
    paths = sorted(owner, key=lambda path: (owner[path], path))
    shapes = content = None
    if verify:
        measured = _measure(root, paths, max_pixels, problems, progress)
        paths = _without_duplicates(measured, owner, problems)
        shapes = np.array([measured[path].shape for path in paths], dtype=np.int64).reshape(-1, 3)
        content = np.array([measured[path].content for path in paths], dtype=np.uint64)
    else:
        paths = _named_as_images(paths, problems)
    names = [owner[path] for path in paths]
    _require_images(root, set(folders.values()) - set(names), problems)
    pixels = FilePixels(root, np.array(paths, dtype=np.str_), shapes, max_pixels)
    return Samples.build(pixels, names, _ids(paths), content=content), problems


def images_in(place: Path) -> list[Path]:
    """An image file itself, or all images below a folder, whatever its layout."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise BranchoutError(f"there is no image or folder {place}")
    found = sorted(place / path for path in _walk(place, "", _above(place), Problems()))
    images = [path for path in found if looks_like_image(path)]
    if not images:
        raise BranchoutError(f"{place} contains no images; {len(found):,} other files were found")
    return images


# Finding the files.


def _class_folders(
    root: Path, above: frozenset[Identity | None], known: Collection[str], problems: Problems
) -> dict[str, str]:
    """The folder of each class → the name of the class, which is the folder's name in one Unicode form."""
    inside = list(_entries(root, "", problems))
    folders = [name for name, is_folder in inside if is_folder and not _is_loop(root, name, above, problems)]
    strays = []
    for name in (name for name, is_folder in inside if not is_folder):
        if looks_like_image(root / name):
            strays.append(name)
            problems.add(Kind.STRAY, name)
        else:
            problems.add(Kind.COMPANION, name)
    if not folders:
        found = f"images directly in it: {len(strays):,}, such as {strays[0]}" if strays else "none in it"
        raise _layout_error(root, f"expected one folder per class, found {found}")
    if all(name.lower() in SPLITS for name in folders):
        nested = [name for name in folders if any(is_folder for _, is_folder in _entries(root / name, "", Problems()))]
        if nested:
            guess = next((name for name in nested if name.lower().startswith("train")), nested[0])
            raise _layout_error(
                root, f"found {_listed(nested)} in it, with class folders below: did you mean {root / guess}?"
            )
    return _name_classes(folders, known, problems)


def _name_classes(folders: Iterable[str], known: Collection[str], problems: Problems) -> dict[str, str]:
    names = {folder: unicodedata.normalize("NFC", printable(folder)) for folder in folders}
    for name, same in _grouped(names, names.__getitem__).items():
        if len(same) > 1:
            problems.add(Kind.MERGED, name, " and ".join(ascii(folder) for folder in same))
    for same in _grouped(sorted(set(names.values())), _without_case).values():
        if len(same) > 1 and not set(same) <= set(known):
            problems.add(Kind.CASE, same[0], "also " + ", ".join(same[1:]))
    return names


def _walk(root: Path, folder: str, above: frozenset[Identity | None], problems: Problems) -> Iterator[str]:
    """Every regular file below a folder, links followed, as a path relative to the root."""
    waiting = [(folder, above)]
    while waiting:
        folder, above = waiting.pop()
        below = above | {_identity(root / folder)}
        for name, is_folder in _entries(root / folder, folder, problems):
            path = f"{folder}/{name}".lstrip("/")
            if not is_folder:
                yield path
            elif not _is_loop(root, path, below, problems):
                waiting.append((path, below))


def _entries(folder: Path, relative: str, problems: Problems) -> Iterator[tuple[str, bool]]:
    """Name, and whether it is a folder, of what lies in a folder, in order. What cannot be used is reported."""
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        problems.add(Kind.UNREADABLE, relative, error.strerror or str(error))
        return
    for entry in entries:
        path = f"{relative}/{entry.name}".lstrip("/")
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            problems.add(Kind.HIDDEN, path)
            continue
        try:
            if entry.is_symlink():
                entry.stat()  # raises where the link leads nowhere
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except FileNotFoundError:
            problems.add(Kind.DANGLING, path)
        except OSError as error:
            problems.add(
                Kind.LOOP if error.errno == errno.ELOOP else Kind.UNREADABLE, path, error.strerror or str(error)
            )
        else:
            if is_folder or is_file:
                yield entry.name, is_folder
            else:
                problems.add(Kind.NOT_AN_IMAGE, path, "not a regular file")


def _identity(folder: Path) -> Identity | None:
    """What is the same for two paths to one folder; None where it cannot be had, and listing it will say why."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _above(root: Path) -> frozenset[Identity | None]:
    """The folder itself and all folders it lies in: a link back to one of them would never end."""
    real = root.resolve()
    return frozenset(_identity(folder) for folder in (real, *real.parents))


def _is_loop(root: Path, path: str, above: frozenset[Identity | None], problems: Problems) -> bool:
    loops = _identity(root / path) in above
    if loops:
        problems.add(Kind.LOOP, path)
    return loops


def _ids(paths: list[str]) -> list[str]:
    """Paths in one Unicode form, except where that would make two files one."""
    composed = [unicodedata.normalize("NFC", printable(path)) for path in paths]
    count = Counter(composed)
    return [new if count[new] == 1 else printable(old) for new, old in zip(composed, paths, strict=True)]


# Looking into them.


@dataclass(frozen=True)
class _Measured:
    shape: tuple[int, int, int]
    content: int
    """A hash of the file's bytes."""


def _measure(
    root: Path, paths: list[str], max_pixels: int, problems: Problems, progress: Callable[[int, int], None] | None
) -> dict[str, _Measured]:
    """What decoding says of every file; those that fail are reported and left out."""
    measured = {}
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for start in range(0, len(paths), 1024):  # in parts, so that an interrupt need not wait for all
            part = paths[start : start + 1024]
            for path, result in zip(part, pool.map(lambda p: _measure_one(root / p, max_pixels), part), strict=True):
                if isinstance(result, _Measured):
                    measured[path] = result
                else:
                    problems.add(result.kind, path, result.detail)
            if progress:
                progress(start + len(part), len(paths))
    return measured


def _measure_one(path: Path, max_pixels: int) -> _Measured | UnreadableImage:
    try:
        with open_regular(path) as file:
            shape = measure(file, max_pixels=max_pixels)
            file.seek(0)
            return _Measured(shape, content_hash(file))
    except OSError as error:
        return UnreadableImage(Kind.UNREADABLE, error.strerror or str(error))
    except UnreadableImage as error:
        foreign = error.kind in {Kind.NOT_AN_IMAGE, Kind.EMPTY} and path.suffix.lower() in COMPANION_SUFFIXES
        return UnreadableImage(Kind.COMPANION, "") if foreign else error


def _without_duplicates(measured: dict[str, _Measured], owner: dict[str, str], problems: Problems) -> list[str]:
    """The first copy in each class. An image in two classes stays in both: which is right is not ours to say."""
    kept = []
    seen: dict[int, dict[str, str]] = {}
    for path, file in measured.items():
        copies = seen.setdefault(file.content, {})
        name = owner[path]
        if name in copies:
            problems.add(Kind.DUPLICATE, path, f"same as {copies[name]}")
            continue
        if copies:
            problems.add(Kind.CONFLICT, path, f"same as {next(iter(copies.values()))}")
        copies[name] = path
        kept.append(path)
    return kept


def _named_as_images(paths: list[str], problems: Problems) -> list[str]:
    kept = []
    for path in paths:
        if path.lower().endswith(IMAGE_SUFFIXES):
            kept.append(path)
        else:
            problems.add(Kind.COMPANION, path)
    return kept


# What is said when nothing can be made of a folder.


def _require_folder(root: Path) -> None:
    try:
        os.scandir(root).close()
    except FileNotFoundError:
        near = get_close_matches(
            root.name, [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
        )
        guess = f": did you mean {root.parent / near[0]}?" if near else ""
        raise _layout_error(root, f"there is no such folder{guess}") from None
    except NotADirectoryError:
        raise _layout_error(root, "it is a file; an archive has to be unpacked first") from None
    except OSError as error:
        raise BranchoutError(f"{root} cannot be read: {error.strerror}") from error


def _layout_error(root: Path, found: str) -> BranchoutError:
    return BranchoutError(
        f"{root} is not a folder of class folders: {printable(found)}\n"
        f"The layout expected, where the folders' names are the names of the classes:\n"
        f"  {root.name or root}/\n"
        "    robin/\n"
        "      one.jpg\n"
        "      two.jpg\n"
        "    thrush/\n"
        "      three.jpg"
    )


def _require_images(root: Path, missing: set[str], problems: Problems, most: int = 10) -> None:
    """Raise if a class has no usable image, with every other problem of the folder: they can be mended at once."""
    if not missing:
        return
    of_missing: dict[str, Problems] = {name: Problems() for name in missing}
    others = Problems()
    for problem in problems:
        name = unicodedata.normalize("NFC", problem.path.split("/")[0])
        of_class = name in missing and problem.kind not in {Kind.MERGED, Kind.CASE}
        (of_missing[name] if of_class else others).items.append(problem)
    lines = []
    for name in sorted(missing)[:most]:
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in of_missing[name].counts.items())
        lines.append(f"  {name}: {reasons or 'no files in it'}")
    if len(missing) > most:
        lines.append(f"  … and {len(missing) - most:,} more")
    if others.items:
        lines += ["Other problems in this folder:", *(f"  {line}" for line in others.summary())]
    raise BranchoutError(
        f"{len(missing):,} class{' has' if len(missing) == 1 else 'es have'} no usable image in {printable(root)}:\n"
        + "\n".join(lines)
        + "\nAdd images to these class folders or remove the folders, then run the command again."
    )


# Small matters of text.


def _without_case(name: str) -> str:
    return unicodedata.normalize("NFC", name.casefold())


def _grouped(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def _listed(names: list[str]) -> str:
    return ", ".join(f"{name}/" for name in names)
