"""How long the whole α×β grid of stage II takes, against one point alone on the same cached features.

    python benchmarks/speed/fusion_grid.py --out results/speed

Features are random (their values do not change the work); sizes are the paper's kinds: 180+20 and 800+40 classes, ten
exemplars a class, k = 512, ten cached views, ten epochs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from branchout.bench import rows as results
from branchout.labels import LabelSpace
from branchout.method.recipes import GRID, REFERENCE
from branchout.method.score_fusion import HeadLayout, Stage2Data
from branchout.method.stage2 import train_grid
from branchout.training.loop import best_device

K, VIEWS, PER_CLASS = 512, 10, 10


def seconds(layout: HeadLayout, data: Stage2Data, grid: tuple[tuple[float, float], ...], repeats: int) -> float:
    settings = replace(REFERENCE.stage_two, grid=grid)
    taken = []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        train_grid(layout, [data], settings, per_class=PER_CLASS)
        if data.u.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = best_device()
    for base, novel in ((180, 20), (800, 40)):
        space = LabelSpace.of((f"b{n}" for n in range(base)), (f"n{n}" for n in range(novel)))
        generator = torch.Generator(device).manual_seed(0)
        count = (base + novel) * PER_CLASS
        labels = torch.arange(base + novel, device=device).repeat_interleave(PER_CLASS)
        data = Stage2Data(
            u=torch.randn(VIEWS, count, 2, K, generator=generator, device=device) * (4 / K**0.5),
            z=torch.randn(VIEWS, count, base + novel, generator=generator, device=device) * 3,
            labels=labels,
            origin=(labels >= base).long(),
        )
        layout = HeadLayout(space, (0, 1))
        one = seconds(layout, data, GRID[:1], options.repeats)
        whole = seconds(layout, data, GRID, options.repeats)
        row = {
            "of": f"{len(GRID)} grid points in one pass, {base}+{novel} classes",
            "against": "one point alone",
            "ratio": whole / one,
            "of_seconds": whole,
            "against_seconds": one,
            **results.provenance(),
        }
        results.write(options.out, f"fusion-grid-{device.type}-{base}+{novel}", row)
        print(
            f"{device.type} {base}+{novel}: grid {whole:.3f} s, one point {one:.3f} s, ratio {whole / one:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
