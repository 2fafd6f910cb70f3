"""How the time of a step, and the size of the model, grow over many steps.

Extends a small model of glyphs again and again, two classes a step, with exemplars of every earlier class, on a CPU:
as `extend` does by default, and with deltas between all branches (--fuse). For each step: its seconds of CPU time, so
that a busy machine changes little, and the model's bytes on disk.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.speed.common import Rows, Settings, exponent
from branchout import api
from branchout.data.glyphs import glyphs
from branchout.data.memory import keep
from branchout.data.samples import ArrayPixels, Samples

BASE, NEW = 20, 2
"""Classes of the base and of each step."""
EXPECTED = {
    "many-steps": {"seconds": 2.0, "bytes": 2.0},
    "many-steps-deltas": {"seconds": 3.0, "bytes": 2.0},
}
"""Exponents of the number of steps t, where fixed costs no longer weigh. Step t runs t branches on the exemplars of t
steps; with deltas it also learns t² of them on these exemplars. A model has t branches, each of which corrects the
logits of up to t steps, and t² deltas."""


def drawn(classes: int) -> Samples:
    """20 images of each of the first characters, drawn once and kept as arrays."""
    table = glyphs(20, 1).train
    table = table.of_classes(table.classes[:classes])
    return Samples.build(ArrayPixels(np.stack([table.read(n) for n in range(len(table))])), table.names, table.ids)


def measure(steps: int, folder: Path, *, fuse: bool) -> list[dict[str, float]]:
    images = drawn(BASE + NEW * steps)
    names = images.classes
    model = api.pretrain(images.of_classes(names[:BASE]), width=8, size=32, kind="glyph", epochs=4, device="cpu")
    model.save(folder / "0")
    known = BASE
    found = []
    for step in range(1, steps + 1):
        memory = keep(images.of_classes(names[:known]), per_class=3, seed=0)
        out, start = folder / str(step), time.process_time()
        model = model.extend(images.of_classes(names[known : known + NEW]), memory=memory, out=out, fuse=fuse, epochs=2)
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


def rows(settings: Settings) -> Rows:
    steps = settings.pick(60, 4)
    for name, expected in EXPECTED.items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(steps, Path(folder), fuse=name.endswith("-deltas"))
        sizes = [float(row["step"]) for row in found]
        last, first = found[-1], found[0]
        yield (
            name,
            {
                "of": f"bytes of a model after {steps} steps of {NEW} classes",
                "against": "bytes of its base, branches and heads",
                "ratio": last["bytes"] / last["branches_and_heads_bytes"],
                "of_seconds": last["seconds"],
                "against_seconds": first["seconds"],
                "expected_exponents": expected,
                "exponents": {key: exponent(sizes, [row[key] for row in found]) for key in first if key != "step"},
                "steps": found,
                "threads": torch.get_num_threads(),
            },
        )
