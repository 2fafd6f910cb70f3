"""How long a folder of a million files takes to list, and how much memory the list needs, against torchvision.

The files are empty; nothing is decoded, as for published datasets. Every way to list them runs in a process of its own,
once before it is measured, so that the file system's cache is warm for all, and then three times; the fastest counts.
A second row has what the perceptual hash of near-duplicates adds to the check that decodes each file.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from benchmarks.speed.common import Row, Rows, Settings

CLASSES = 1000


def list_plainly(folder: str) -> int:
    """The least that any listing has to do: every name seen, none kept."""
    return sum(len(list(os.scandir(entry))) for entry in os.scandir(folder))


def list_with_torchvision(folder: str) -> object:
    from torchvision.datasets import ImageFolder

    return ImageFolder(folder)


def list_with_branchout(folder: str) -> object:
    from branchout.data.folders import scan

    return scan(Path(folder), verify=False)


WAYS = {"os.scandir": list_plainly, "torchvision": list_with_torchvision, "branchout": list_with_branchout}


def measure_here(way: str, folder: str) -> dict[str, float]:
    """Seconds, and megabytes by which this process grows at most (Linux)."""
    WAYS[way](f"{folder}-small")  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_kilobytes()
    start = time.perf_counter()
    kept = WAYS[way](folder)
    seconds = time.perf_counter() - start
    grown = peak_kilobytes() - before
    del kept
    return {"seconds": seconds, "megabytes": grown / 1024}


def peak_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(way: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.speed.folder_scan", way, folder]
    found = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(4)]
    return dict(min(found[1:], key=lambda each: each["seconds"]))


def make(folder: Path, files: int) -> None:
    for number in range(CLASSES):
        place = folder / f"class-{number:04}"
        place.mkdir(parents=True)
        for image in range(files // CLASSES):
            os.close(os.open(place / f"n{number:08}_{image:05}.JPEG", os.O_CREAT | os.O_WRONLY))


def hash_row() -> Row:
    """The perceptual hash of a JPEG of 256 pixels, against the check that decodes it."""
    from benchmarks.speed.common import compared
    from branchout.data.decode import measure
    from branchout.data.near_duplicates import image_hash

    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((341, 256), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    jpeg, repeats = buffer.getvalue(), 500
    copies = [measure(jpeg)[1] for _ in range(20)]
    start = time.perf_counter()
    for _ in range(repeats):
        measure(jpeg)
    middle = time.perf_counter()
    for number in range(repeats):
        image_hash(copies[number % 20])
    end = time.perf_counter()
    seconds = (end - middle) / repeats, (middle - start) / repeats
    return compared("perceptual hash of an image of 341 × 256 pixels", "the check that decodes it", *seconds)


def rows(settings: Settings) -> Rows:
    from benchmarks.speed.common import compared  # imports torch, which the processes that list need not

    files = settings.pick(1_000_000, 2000)
    with tempfile.TemporaryDirectory() as work:
        make(Path(work, "images"), files)
        make(Path(work, "images-small"), CLASSES)
        found = {way: measured(way, str(Path(work, "images"))) for way in WAYS}
    for way, figures in found.items():
        print(f"{way}: {figures['seconds']:.1f} s, {figures['megabytes']:.0f} MB")
    yield (
        "folder-scan",
        compared(
            f"listing {files:,} files in {CLASSES:,} class folders",
            "torchvision ImageFolder",
            found["branchout"]["seconds"],
            found["torchvision"]["seconds"],
            scandir_seconds=found["os.scandir"]["seconds"],
            of_megabytes=found["branchout"]["megabytes"],
            against_megabytes=found["torchvision"]["megabytes"],
        ),
    )
    yield "image-hash", hash_row()


if __name__ == "__main__":
    print(json.dumps(measure_here(*sys.argv[1:])))
