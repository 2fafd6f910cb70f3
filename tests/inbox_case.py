"""An inbox to test with: ten photos of two classes that the base does not know, and images of those that it knows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from helpers import BASE
from PIL import Image

from branchout import api
from branchout.data.glyphs import glyphs
from branchout.data.samples import Samples

UNKNOWN = ("infinity", "upwards arrow")
UNKNOWN_GLYPHS = ("beamed eighth notes", "black telephone")
"""Characters that the built-in base does not know."""


class Case(NamedTuple):
    root: Path
    model: Path
    truth: dict[str, str]
    """The class of each file in the inbox."""

    @property
    def photos(self) -> Path:
        return self.root / "photos"

    @property
    def old(self) -> Path:
        return self.root / "old"


def write(samples: Samples, name: str, count: int, folder: Path, prefix: str = "", first: int = 0) -> list[str]:
    """The first images of a class as files; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.flatnonzero(samples.names == name)[first : first + count]
    files = [f"{prefix}{number}.png" for number in range(len(rows))]
    for file, row in zip(files, rows, strict=True):
        Image.fromarray(samples.read(int(row))[:, :, 0]).save(folder / file)
    return files


def make(root: Path, base: api.Model, train: Samples) -> Case:
    assert base.folder is not None
    for name in BASE:
        write(train, name, 5, root / "old" / name)
    truth = {}
    for letter, name in zip("ab", UNKNOWN, strict=True):
        truth |= dict.fromkeys(write(train, name, 5, root / "photos", f"{letter}-"), name)
    return Case(root, base.folder, truth)


def make_with_glyphs(root: Path) -> tuple[Case, Samples]:
    """The same for the built-in base, which is good enough to learn from five photos; and images to test with."""
    base = api.load("glyphs")
    known = base.classes[::40]
    data = glyphs(5, 8, classes=[*known, *UNKNOWN_GLYPHS])
    for name in known:
        write(data.train, name, 5, root / "old" / name)
    truth = {}
    for letter, name in zip("ab", UNKNOWN_GLYPHS, strict=True):
        truth |= dict.fromkeys(write(data.train, name, 5, root / "photos", f"{letter}-"), name)
    assert base.folder is not None
    return Case(root, shutil.copytree(base.folder, root / "v1"), truth), data.val


def check_taught(model: api.Model, val: Samples) -> None:
    """It recognises other images of the classes it was taught, and still those it knew."""
    found = model.evaluate(val)
    assert found.before is not None
    assert found.before.base is not None
    assert found.after.base is not None
    assert found.after.novel is not None
    assert found.after.novel >= 0.5
    assert found.after.base >= found.before.base - 0.05
