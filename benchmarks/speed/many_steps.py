"""How the time of a step, and the size of the model, grow over many steps.

    python benchmarks/speed/many_steps.py --steps 60 --out results

Extends a small model of glyphs again and again, two classes a step, with deltas between all branches (--fuse) and
exemplars of every earlier class. Writes OUT/speed/many-steps.json: for each step its seconds of CPU time (so that a
busy machine changes little) and the model's bytes on disk; and the exponents: the slope of log(value) against log(step)
over the second half of the steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from branchout import api
from branchout.bench import rows as results
from branchout.data.glyphs import glyphs
from branchout.data.memory import keep
from branchout.data.samples import ArrayPixels, Samples

BASE, NEW = 20, 2
"""Classes of the base and of each step."""


def drawn(classes: int) -> Samples:
    """20 images of each of the first characters, drawn once and kept as arrays."""
    table = glyphs(20, 1).train
    table = table.of_classes(table.classes[:classes])
    return Samples.build(ArrayPixels(np.stack([table.read(n) for n in range(len(table))])), table.names, table.ids)


def exponent(values: list[float]) -> float:
    """The slope of log(value) against log(step) over the second half."""
    half = len(values) // 2
    steps = np.arange(1, len(values) + 1)
    return float(np.polyfit(np.log(steps[half:]), np.log(values[half:]), 1)[0])


def measure(steps: int, folder: Path) -> list[dict[str, float]]:
    images = drawn(BASE + NEW * steps)
    names = images.classes
    model = api.pretrain(images.of_classes(names[:BASE]), width=8, size=32, kind="glyph", epochs=4, device="cpu")
    model.save(folder / "0")
    known = BASE
    found = []
    for step in range(1, steps + 1):
        memory = keep(images.of_classes(names[:known]), per_class=3, seed=0)
        out, start = folder / str(step), time.process_time()
        model = model.extend(images.of_classes(names[known : known + NEW]), memory=memory, out=out, fuse=True, epochs=2)
        seconds = time.process_time() - start
        known += NEW
        start = time.process_time()
        api.load(out, device="cpu")
        counts = model.saved.classifier.parameter_counts()
        needed = 4 * sum(count for part, count in counts.items() if part != "deltas")
        found.append(
            {
                "step": step,
                "seconds": seconds,
                "load_seconds": time.process_time() - start,
                "bytes": sum(file.stat().st_size for file in out.iterdir()),
                "manifest_bytes": (out / "branchout.json").stat().st_size,
                "branches_and_heads_bytes": needed,
                **{f"{part}_seconds": value for part, value in model.outcome.seconds.items()},  # type: ignore[union-attr]
            }
        )
        print({name: round(value, 3) for name, value in found[-1].items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.steps, Path(folder))
    last = rows[-1]
    row = {
        "of": f"bytes of a model after {options.steps} steps of {NEW} classes",
        "against": "bytes of its base, branches and heads",
        "ratio": last["bytes"] / last["branches_and_heads_bytes"],
        "exponents": {name: exponent([each[name] for each in rows]) for name in rows[0] if name != "step"},
        "steps": rows,
        "threads": options.threads,
        **results.provenance(),
    }
    print(row["ratio"], row["exponents"], results.write(options.out / "speed", "many-steps", row))


if __name__ == "__main__":
    main()
