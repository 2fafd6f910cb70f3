"""Shared by the speed measurements: settings, timing in turns, and rows."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from branchout.bench import rows as results
from branchout.data.images import ResidentImages
from branchout.data.preprocess import Preprocessing
from branchout.model import architectures
from branchout.model.bases import rebuild
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.training.device import give_back_memory, wait_for

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""The name of a file and what it holds."""


@dataclass(frozen=True)
class Settings:
    """Where to measure. `tiny` only tries a script: its figures mean nothing."""

    device: torch.device
    tiny: bool = False

    def pick(self, usual: int, tiny: int) -> int:
        return tiny if self.tiny else usual

    @property
    def width(self) -> int | None:
        """Of a ResNet: narrower on a CPU, where one of the usual 64 channels takes minutes."""
        return None if self.gpu else 16

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def in_turns(works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """The median seconds of each, in turns, so that other load affects all; the first turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            taken[name].append(seconds_of(work, device))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def compared(of: str, against: str, of_seconds: float, against_seconds: float, **more: object) -> Row:
    """A row: `ratio` is the time of the first over that of the second."""
    return {
        "of": of,
        "against": against,
        "ratio": of_seconds / against_seconds,
        "of_seconds": of_seconds,
        "against_seconds": against_seconds,
        **more,
    }


def write(folder: Path, name: str, row: Row) -> Path:
    """Write a row with its versions, hardware, commit and command."""
    about = results.provenance()
    about["command"] = f"python -m benchmarks.speed {' '.join(sys.argv[1:])}".strip()
    return results.write(folder, name, {**row, **about})


def exponent(sizes: list[float], values: list[float]) -> float:
    """The slope of log(value) against log(size) over the second half, where fixed costs matter less."""
    half = len(values) // 2 if len(values) > 3 else 0
    return float(np.polyfit(np.log(sizes[half:]), np.log(values[half:]), 1)[0])


def base_model(arch: str, classes: int, device: torch.device, size: int = 64, width: int | None = None) -> Classifier:
    """An untrained network: its times are those of a trained one."""
    torch.manual_seed(0)
    sizes = Preprocessing.from_scratch("photo", size)
    described = architectures.describe(arch, sizes, width=width)
    backbone, _ = rebuild(described)
    head = CosineHead(backbone.features, classes)
    return Classifier(described, backbone, head, [f"old {n}" for n in range(classes)], sizes).on_device(device)


def random_images(count: int, model: Classifier, device: torch.device, seed: int = 0) -> ResidentImages:
    size = model.preprocessing.size
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (count, 3, size // 8, size // 8), generator=generator).float()
    pixels = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear").byte()
    return ResidentImages(pixels.to(device), model.preprocessing, device)


class Peak:
    """The memory a piece of work takes at its highest: of the GPU, or by which this process grows (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            give_back_memory()  # else memory that earlier work has freed is used again, and nothing grows
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            self.before = resident_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        gpu = self.device.type == "cuda"
        after = torch.cuda.max_memory_allocated(self.device) if gpu else resident_bytes()
        self.bytes = max(0, after - self.before)


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
