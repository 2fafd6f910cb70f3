"""Where images come from: a folder, samples, or several of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from pathlib import Path

import numpy as np

from branchout.data.folders import scan
from branchout.data.problems import Problems
from branchout.data.samples import TEXT, Samples, concatenate, content_hashes
from branchout.data.verify import copies
from branchout.errors import BranchoutError
from branchout.progress import OnProgress, silent

Source = str | Path | Samples
"""A folder with one folder of images per class, tar shards, or samples."""
Sources = Source | Sequence[Source]
"""One source of images, or a list of them."""


def samples_in(
    source: Sources,
    problems: list[str] | None = None,
    known: Sequence[str] = (),
    classes_from: str | None = None,
    on_progress: OnProgress = silent,
) -> Samples:
    """Samples as they are, or all usable images of a folder of class folders or of tar shards.

    Of several sources, those of all; an image that is in two of them counts once. `known` are the model's classes;
    `classes_from` says how nested class folders are read (`folders` or `leaves`). What was wrong is added to
    `problems`.
    """
    problems = [] if problems is None else problems
    if isinstance(source, Samples):
        return source
    if isinstance(source, str | PathLike):
        found, wrong = scan(Path(source), known=known, classes_from=classes_from, on_progress=on_progress)
        problems += [f"{source}: {line}" for line in wrong.summary()]
        return found
    sources = in_one_order(source)
    parts = [samples_in(each, problems, known, classes_from, on_progress) for each in sources]
    return parts[0] if len(parts) == 1 else _joined(sources, parts, problems)


def test_samples(test: Source) -> Samples:
    """The images to measure accuracies on; none at all are an error."""
    samples = samples_in(test)
    if not len(samples):
        raise BranchoutError("There are no images to evaluate on. Give a folder with one folder of images per class")
    return samples


def in_one_order(sources: Iterable[Source]) -> list[Source]:
    """Folders by their path, then samples: the order in which folders are named does not change a result.

    Refuses what is no source, an empty list, and a folder that is named twice.
    """
    given = list(sources) if isinstance(sources, Iterable) else [sources]
    wrong = [each for each in given if not isinstance(each, str | PathLike | Samples)]
    if wrong or not given:
        found = "an empty list" if not wrong else "None" if wrong[0] is None else f"a {type(wrong[0]).__name__}"
        raise BranchoutError(f"Expected a folder of images, samples, or a list of these; found {found}.")
    named = (each for each in given if not isinstance(each, Samples))
    folders = sorted(named, key=lambda folder: Path(folder).resolve())
    for one, other in pairwise(folders):
        if Path(one).resolve() == Path(other).resolve():
            same = f"{one} is named twice" if str(one) == str(other) else f"{one} and {other} are the same folder"
            raise BranchoutError(f"{same}. Name each folder of images once.")
    return [*folders, *(each for each in given if isinstance(each, Samples))]


def _joined(sources: Sequence[Source], parts: Sequence[Samples], problems: list[str]) -> Samples:
    """All parts, without copies; images of folders are named by their whole path."""
    named = [
        part if isinstance(source, Samples) else replace(part, ids=_below(source, part.ids))
        for source, part in zip(sources, parts, strict=True)
    ]
    both, wrong = concatenate(named), Problems()
    both = both.select(~copies(both, content_hashes(both), wrong))
    problems += wrong.summary()
    return both


def _below(folder: str | Path, ids: np.ndarray) -> np.ndarray:
    return np.array([str(Path(folder) / str(name)) for name in ids], dtype=TEXT)
