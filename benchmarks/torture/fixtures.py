"""Small folders, models and files that the attacks start from, made once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.torture.run import command


@dataclass(frozen=True)
class Material:
    root: Path

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    @property
    def photo(self) -> Path:
        return next((self.root / "new").glob("*/*.png"))

    def extend(self, out: Path, base: str = "base", new: str = "new", epochs: int = 2) -> Sequence[str | Path]:
        """The words of an extension that takes a few seconds."""
        folders = self / new, "--base", self / base, "--memory", self / "memory", "--out", out
        return ["extend", *folders, "--epochs", str(epochs)]

    def pretrain(self, out: Path, epochs: int = 2) -> Sequence[str | Path]:
        return ["pretrain", self / "old", "--width", "8", "--size", "32", "--out", out, "--epochs", str(epochs)]


def images(folder: Path, classes: range, count: int, seed: int) -> None:
    """`count` noisy images of each class, which a small network can tell apart."""
    for number in classes:
        rng = np.random.default_rng([seed, number])
        pattern = np.kron(np.random.default_rng(number).integers(0, 255, (4, 4, 3)), np.ones((8, 8, 1)))
        place = folder / f"class {number}"
        place.mkdir(parents=True)
        for n in range(count):
            noisy = pattern + rng.normal(0, 40, pattern.shape)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{n}.png")


def make(root: Path) -> Material:
    material = Material(root)
    images(material / "old", range(5), 10, 1)
    images(material / "memory", range(5), 5, 1)
    images(material / "new", range(4, 7), 8, 2)
    images(material / "more", range(7, 9), 6, 3)
    made = [
        command(*material.pretrain(material / "base", 4), seconds=120),
        command(*material.extend(material / "v2"), seconds=120),
        command("scenario", "disjoint", material / "old", "--base", "3", "--novel", "2", "--out", material / "s.json"),
    ]
    for ended in made:
        if ended.status:
            raise SystemExit(f"the harness could not make its material:\n{ended.out}{ended.err}")
    json.loads((material / "s.json").read_text())
    return material
