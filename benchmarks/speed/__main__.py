"""Measure speed, each against an alternative: python -m benchmarks.speed [--only NAME …].

Without --only everything runs that this machine can. Writes one JSON file for each row with both times, their ratio,
settings, versions, hardware and commit.
"""

from __future__ import annotations

import argparse
import importlib
import time
import traceback
from pathlib import Path

import torch

from benchmarks.speed.common import Settings, write
from branchout.training.loop import best_device

ON_GPU = ("training-step", "fusion-grid", "extension", "input-pipeline", "growth", "inference", "branches")
"""Measured on the device; all of them take a GPU less than five minutes."""
ON_CPU = ("many-steps", "folder-scan", "engines")
"""Always measured on the CPU, so not run by default where there is a GPU."""
NAMES = (*ON_GPU, *ON_CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--device", default=str(best_device()))
    parser.add_argument("--tiny", action="store_true", help="try the scripts on tiny inputs; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    settings = Settings(torch.device(options.device), options.tiny)
    failed = []
    for name in options.only or (ON_GPU if settings.gpu else NAMES):
        start = time.perf_counter()
        try:
            for file, row in importlib.import_module(f"benchmarks.speed.{name.replace('-', '_')}").rows(settings):
                path = write(options.out, file, row)
                print(f"{path}: {row['of']} / {row['against']} = {row['ratio']:.3g}", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
