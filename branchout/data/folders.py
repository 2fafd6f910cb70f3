"""Folders of images as people have them: `DIR/<class>/…/<image>`, with every flaw counted and none of them fatal."""

from __future__ import annotations

import errno
import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import numpy.typing as npt

from branchout.data import tar_shards
from branchout.data.decode import Kind, looks_like_image
from branchout.data.problems import Problems
from branchout.data.samples import TEXT, UNASSIGNED, Samples
from branchout.data.verify import IMAGE_SUFFIXES, FilePixels, ImageFile, Member, named_as_images, verified
from branchout.errors import BranchoutError, canonical, printable, some, unknown
from branchout.progress import OnProgress, silent

SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
CLASSES_FROM = ("folders", "leaves")
"""Which folder names a class where class folders lie in others: the outermost one, or the one that holds the files."""

Identity = tuple[int, int]
"""Device and number of a folder, whatever path led to it."""
Above = frozenset[Identity | None]
"""The folders that a folder lies in."""
Paths = npt.NDArray[np.bytes_]


def scan(
    root: Path,
    *,
    verify: bool = True,
    known: Collection[str] = (),
    classes_from: str | None = None,
    on_progress: OnProgress = silent,
) -> tuple[Samples, Problems]:
    """All usable images below a folder of class folders or in tar shards, and what was wrong with the others.

    Verification decodes every file once, whatever its name. Without it files are only listed, by extension.
    `known` are classes the model already has: that two of their names differ only in case is no problem.
    `classes_from` is one of `CLASSES_FROM`; without it, nested class folders that can be read in two ways are an error.
    """
    root = Path(root)
    problems = Problems()
    if classes_from not in (None, *CLASSES_FROM):
        raise unknown("way to read nested folders (--classes-from)", classes_from, CLASSES_FROM)
    if tar_shards.are_shards(root):
        samples = tar_shards.list_images(root, problems)
        classes = samples.classes
    else:
        _require_folder(root)
        samples, classes = _listed_images(root, known, classes_from, problems)
    if verify:
        samples = verified(samples, problems, on_progress, f"Checking images in {root.name}")
    else:
        samples = named_as_images(samples, problems)
    _require_images(root, set(classes) - set(samples.classes), problems)
    return samples, problems


def images_in(place: Path) -> list[ImageFile]:
    """An image file itself, all images below a folder, whatever its layout, or all images in tar shards."""
    if tar_shards.are_shards(place):
        return tar_shards.members(place)
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise BranchoutError(f"there is no image or folder {place}")
    found = _files_below(place, Problems())
    images: list[ImageFile] = [path for path in found if looks_like_image(path)]
    if not images:
        others = "1 other file was" if len(found) == 1 else f"{len(found):,} other files were"
        raise BranchoutError(f"{place} contains no images; {others} found")
    return images


def unlabelled_images(place: Path) -> tuple[Samples, Problems]:
    """All images below a folder, in tar shards or in one file, without classes, and what was wrong with other files."""
    root = place if place.is_dir() else place.parent
    problems = Problems()
    in_files = place.is_dir() and not tar_shards.are_shards(place)
    found: Sequence[ImageFile] = _files_below(place, problems) if in_files else images_in(place)
    spans = [(file.start, file.size) for file in found if isinstance(file, Member)]  # of all, or of none
    paths = [(file.shard if isinstance(file, Member) else file).relative_to(root) for file in found]
    ids = [
        f"{path}/{file.name}" if isinstance(file, Member) else str(path)
        for path, file in zip(paths, found, strict=True)
    ]
    encoded = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
    pixels = FilePixels(root, encoded, np.array(spans) if spans else None)
    samples = verified(Samples.build(pixels, ["-"] * len(found), ids), problems)
    if not len(samples):
        others = "".join(f"\n  {line}" for line in problems.summary())
        raise BranchoutError(
            f"{printable(place)} contains no images that can be read; files found: {len(found):,}{others}"
        )
    return samples, problems


# Finding the files.


def _files_below(folder: Path, problems: Problems) -> list[Path]:
    walk = _walk(folder, "", _above(folder), problems)
    return sorted(folder / inside / name for inside, names in walk for name in names)


def _listed_images(
    root: Path, known: Collection[str], classes_from: str | None, problems: Problems
) -> tuple[Samples, tuple[str, ...]]:
    """Every regular file of every class, none opened yet, and the names of all classes, with or without files."""
    above = _above(root)
    tops = _class_folders(root, above, problems)
    files = {
        folder: np.array([os.fsencode(f"{folder}/{name}") for name in names], dtype=np.bytes_)
        for top in tops
        for folder, names in _walk(root, top, above, problems)
    }
    inside = _folders_of_classes(root, tops, files, classes_from, problems)
    named = _name_classes(list(inside), known, problems)
    classes = tuple(sorted(named))
    counts = [sum(len(files[f]) for folder in named[name] for f in inside[folder]) for name in classes]
    longest = max(of_folder.itemsize for of_folder in files.values())
    paths = np.empty(sum(counts), dtype=f"S{longest}")
    ids = np.empty(len(paths), dtype=TEXT)
    for name, count, end in zip(classes, counts, np.cumsum(counts).tolist(), strict=True):
        of_class = np.concatenate([files.pop(f) for folder in named[name] for f in inside[folder]])
        of_class.sort()
        paths[end - count : end] = of_class
        ids[end - count : end] = _ids(of_class.tolist())
    present = np.flatnonzero(counts)
    samples = Samples(
        pixels=FilePixels(root, paths),
        rows=np.arange(len(paths)),
        classes=tuple(classes[n] for n in present),
        labels=np.repeat(np.arange(len(present)), np.array(counts)[present]),
        ids=ids,
        origin=np.full(len(paths), UNASSIGNED),
    )
    return samples, classes


def _class_folders(root: Path, above: Above, problems: Problems) -> list[str]:
    """The folders in a folder of class folders."""
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
        found = "none in it"
        if strays:
            above_it = Path(os.path.abspath(root)).parent  # noqa: PTH100 – resolve() would follow links
            found = (
                f"images directly in it: {len(strays):,}, such as {strays[0]}. If they are of several classes, move "
                "them into one folder per class. If they are all of one class, give the folder that contains this "
                f"one: {above_it}"
            )
        raise _layout_error(root, f"expected one folder per class, found {found}")
    if all(name.lower() in SPLITS for name in folders):
        nested = [name for name in folders if any(is_folder for _, is_folder in _entries(root / name, "", Problems()))]
        if nested:
            guess = next((name for name in nested if name.lower().startswith("train")), nested[0])
            listed = ", ".join(f"{name}/" for name in nested)
            raise _layout_error(root, f"found {listed} in it, with class folders below: did you mean {root / guess}?")
    return folders


def _folders_of_classes(
    root: Path, tops: Sequence[str], files: Mapping[str, Paths], classes_from: str | None, problems: Problems
) -> dict[str, list[str]]:
    """Every folder that names a class → the folders whose files are of that class."""
    below: dict[str, list[str]] = {top: [] for top in tops}
    for folder in files:
        below[folder.partition("/")[0]].append(folder)
    parents = {folder.rpartition("/")[0] for folder in files}
    nested = {}
    for top, folders in below.items():
        leaves = sorted(folder for folder in folders if folder not in parents or _has_images(files[folder]))
        if top not in leaves or (classes_from == "leaves" and len(leaves) > 1):
            nested[top] = leaves
    if classes_from is None:
        _require_one_reading(root, tops, nested)
    if classes_from != "leaves":
        return below
    for top, leaves in nested.items():
        between = [folder for folder in below.pop(top) if folder not in leaves]
        for path in (path for folder in between for path in files[folder].tolist()):
            problems.add(Kind.COMPANION, os.fsdecode(path))
        below.update({leaf: [leaf] for leaf in leaves})
    return below


def _has_images(paths: Paths) -> bool:
    return any(os.fsdecode(path).lower().endswith(IMAGE_SUFFIXES) for path in paths)


def _require_one_reading(root: Path, tops: Sequence[str], nested: Mapping[str, Sequence[str]]) -> None:
    """Raise where folders in class folders can be classes of their own.

    They cannot if each class has the same ones (`robin/images/`), if their names have no letters (`robin/2024-05-01/`),
    or if there is only one of them.
    """
    inner = {top: {folder.removeprefix(f"{top}/") for folder in folders} for top, folders in nested.items()}
    names = set().union(*inner.values())
    alike = len(inner) > 1 and all(folders == names for folders in inner.values())
    if alike or len(names) <= 1 or not any(letter.isalpha() for name in names for letter in name):
        return
    leaves = [leaf.rpartition("/")[2] for top in tops for leaf in nested.get(top, [top])]
    candidates = some([printable(root / top) for top in nested])
    raise BranchoutError(
        f"{printable(root)} has folders in its class folders, such as {printable(next(iter(nested.values()))[0])}/. "
        "They can be read in two ways:\n"
        f"  --classes-from folders: {_classes(tops)}; the outermost folder names the class\n"
        f"  --classes-from leaves: {_classes(leaves)}; the innermost folder names the class\n"
        "Run the command again with one of these options. If the classes are in one of these folders, give that one "
        f"instead: {candidates}"
    )


def _classes(names: Sequence[str], most: int = 4) -> str:
    distinct = list(dict.fromkeys(printable(name) for name in names))
    more = ", …" if len(distinct) > most else ""
    return f"{len(distinct):,} class{'' if len(distinct) == 1 else 'es'} ({', '.join(distinct[:most])}{more})"


def _name_classes(folders: Sequence[str], known: Collection[str], problems: Problems) -> dict[str, list[str]]:
    """The name of each class, its folder's in one Unicode form → its folders."""
    named: dict[str, list[str]] = {}
    for folder in folders:
        named.setdefault(canonical(folder.rpartition("/")[2]), []).append(folder)
    for name, same in named.items():
        if len({folder.rpartition("/")[0] for folder in same}) > 1:
            raise BranchoutError(
                f"{len(same)} folders name the class {name!r}: {printable(', '.join(same))}. Rename all but one, move "
                "their images into one folder, or use --classes-from folders."
            )
        if len(same) > 1:
            problems.add(Kind.MERGED, name, " and ".join(ascii(folder) for folder in same))
    by_letters: dict[str, list[str]] = {}
    for name in sorted(named):
        by_letters.setdefault(unicodedata.normalize("NFC", name.casefold()), []).append(name)
    for same in by_letters.values():
        if len(same) > 1 and not set(same) <= set(known):
            problems.add(Kind.CASE, same[0], "also " + ", ".join(same[1:]))
    return named


def _walk(root: Path, folder: str, above: Above, problems: Problems) -> Iterator[tuple[str, list[str]]]:
    """A folder and all below it, links followed, as paths relative to the root, each with its regular files."""
    waiting = [(folder, above)]
    while waiting:
        folder, above = waiting.pop()
        below = above | {_identity(root / folder)}
        names = []
        for name, is_folder in _entries(root / folder, folder, problems):
            path = f"{folder}/{name}".lstrip("/")
            if not is_folder:
                names.append(name)
            elif not _is_loop(root, path, below, problems):
                waiting.append((path, below))
        yield folder, names


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


def _above(root: Path) -> Above:
    """The folder itself and all folders it lies in: a link back to one of them would never end."""
    real = root.resolve()
    return frozenset(_identity(folder) for folder in (real, *real.parents))


def _is_loop(root: Path, path: str, above: Above, problems: Problems) -> bool:
    loops = _identity(root / path) in above
    if loops:
        problems.add(Kind.LOOP, path)
    return loops


def _ids(paths: list[bytes]) -> list[str]:
    """Paths in one Unicode form, except where that would make two files one."""
    together = b"/".join(paths)
    if together.isascii() and together.decode().isprintable():  # nearly always, and ten times faster
        return [path.decode() for path in paths]
    composed = [canonical(os.fsdecode(path)) for path in paths]
    count = Counter(composed)
    return [new if count[new] == 1 else printable(os.fsdecode(old)) for new, old in zip(composed, paths, strict=True)]


# What is said when nothing can be made of a folder.


def _require_folder(root: Path) -> None:
    try:
        os.scandir(root).close()
    except FileNotFoundError:
        near = get_close_matches(
            root.name, [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
        )
        guess = f". Did you mean {printable(root.parent / near[0])}?" if near else ""
        raise BranchoutError(f"There is no folder {printable(root)}{guess}") from None
    except NotADirectoryError:
        raise _layout_error(root, "it is a file; only .tar archives are read without unpacking") from None
    except OSError as error:
        raise BranchoutError(f"{root} cannot be read: {error.strerror}") from error


def _layout_error(root: Path, found: str) -> BranchoutError:
    return BranchoutError(
        f"{root} is not a folder of class folders: {printable(found)}\n"
        "Expected layout, in which folder names are class names:\n"
        "  FOLDER/\n"
        "    robin/\n"
        "      one.jpg\n"
        "      two.jpg\n"
        "    thrush/\n"
        "      three.jpg"
    )


LISTED = 10
"""Classes without images that a message names."""


def _require_images(root: Path, missing: set[str], problems: Problems) -> None:
    """Raise if a class has no usable image, with every other problem of the folder: they can be mended at once."""
    if not missing:
        return
    of_missing: dict[str, Problems] = {name: Problems() for name in missing}
    others = Problems()
    for problem in problems:
        parts = unicodedata.normalize("NFC", problem.path).split("/")
        name = next((part for part in reversed(parts) if part in missing), None)
        of_class = name is not None and problem.kind not in {Kind.MERGED, Kind.CASE}
        (of_missing[name] if name is not None and of_class else others).items.append(problem)
    lines = []
    for name in sorted(missing)[:LISTED]:
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in of_missing[name].counts.items())
        lines.append(f"  {name}: {reasons or 'no files in it'}")
    if len(missing) > LISTED:
        lines.append(f"  … and {len(missing) - LISTED:,} more")
    if others.items:
        lines += ["Other problems in this folder:", *(f"  {line}" for line in others.summary())]
    raise BranchoutError(
        f"{len(missing):,} class{' has' if len(missing) == 1 else 'es have'} no usable image in {printable(root)}:\n"
        + "\n".join(lines)
        + "\nAdd images to these class folders or remove the folders, then run the command again."
    )
