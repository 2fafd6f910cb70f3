"""Compaction of ten steps on built-in characters, on a CPU, in one command.

    python -m benchmarks.steps.compact --out results/steps/glyphs-compact.json

Eighty characters in ten steps on a part of the shipped base, with noise, 16 training images and 5 exemplars each. The
model and the compacted one are compared on test images that neither trained nor chose anything.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout import api
from branchout.api.compaction import images_per_second
from branchout.bench.rows import percent, provenance
from branchout.data.glyphs import glyphs
from branchout.data.memory import keep
from branchout.data.samples import ArrayPixels, Samples, concatenate
from branchout.files import write_json
from branchout.metrics import accuracies
from branchout.model import checkpoint
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead

BASE, STEPS, PER_STEP = 50, 10, 8
IMAGES, EXEMPLARS, NOISE = 16, 5, 50.0


def noisy(samples: Samples, rng: np.random.Generator) -> Samples:
    pixels = np.stack([samples.read(n) for n in range(len(samples))])
    pixels = (pixels + rng.normal(scale=NOISE, size=pixels.shape)).clip(0, 255).astype(np.uint8)
    return Samples.build(ArrayPixels(pixels), samples.names, samples.ids)


def base_of(names: list[str]) -> api.Model:
    """The shipped base with the rows of these classes alone."""
    shipped = api.load("glyphs", device="cpu").classifier
    head = CosineHead(shipped.backbone.features, len(names))
    head.load_state_dict({"weight": shipped.base_head.weight[torch.from_numpy(shipped.space.index(names))]})
    cut = Classifier(shipped.arch, shipped.backbone, head, names, shipped.preprocessing, shipped.kind)
    return api.Model(SavedModel(cut, (), ({"what": "opened", "base": "glyphs"},)), None, torch.device("cpu"))


def side(model: api.Model, test: Samples, ten_steps: api.Model) -> dict[str, Any]:
    """Size, speed and accuracies; the parts of the average are those of all ten steps on either side."""
    comparison = model.evaluate(test)
    space = ten_steps.classifier.space
    found = accuracies(comparison.answers, comparison.labels, space)
    return {
        "branches": len(model.classifier.steps),
        "parameters": sum(model.classifier.parameter_counts().values()),
        "bytes": checkpoint.weight_bytes(model.saved),
        "images_per_second": round(images_per_second(model.classifier, model.device), 1),
        "metrics": {name: percent(getattr(found, name)) for name in ("all", "base", "novel", "avg")},
    }


def measured(seed: int, epochs: int | None) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    known, every = api.load("glyphs", device="cpu").classes, glyphs(1, 1).train.classes
    base = sorted(rng.permutation([name for name in every if name in known])[:BASE].tolist())
    new = rng.permutation([name for name in every if name not in known])[: STEPS * PER_STEP].tolist()
    drawn = glyphs(IMAGES, 24, classes=[*base, *new])
    train, val = noisy(drawn.train, rng), noisy(drawn.val, rng)
    dev, test = val.select(np.arange(len(val)) % 2 == 0), val.select(np.arange(len(val)) % 2 == 1)
    model, memory = base_of(base), keep(train.of_classes(base), per_class=EXEMPLARS, seed=seed)
    for step in range(STEPS):
        names = new[step * PER_STEP : (step + 1) * PER_STEP]
        images = train.of_classes(names)
        model = model.extend(images, memory=memory, val=dev.of_classes([*model.classes, *names]), seed=seed, epochs=12)
        memory = concatenate([memory, keep(images, per_class=EXEMPLARS, seed=seed)])
        print(f"step {step + 1}: {len(model.classes)} classes", flush=True)
    found = {"seed": seed, "before": side(model, test, model)}
    for branches in (1, 3):
        small = model.compact(memory, val=dev, branches=branches, seed=seed, epochs=epochs)
        found[f"{branches} left"] = side(small, test, model)
    more = model.compact(train, val=dev, seed=seed, epochs=epochs)
    found["1 left, all training images"] = side(more, test, model)
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path, default=Path("results/steps/glyphs-compact.json"))
    words.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    words.add_argument("--epochs", type=int, help="of the compaction; default: its own")
    asked = words.parse_args()
    made_by = provenance() | {
        "command": f"python -m benchmarks.steps.compact --seeds {' '.join(map(str, asked.seeds))}"
        + (f" --epochs {asked.epochs}" if asked.epochs else "")
    }
    per_seed = [measured(seed, asked.epochs) for seed in asked.seeds]
    settings = {"base_classes": BASE, "steps": STEPS, "new_classes": PER_STEP, "images": IMAGES,
                "exemplars": EXEMPLARS, "noise": NOISE, "epochs": asked.epochs}  # fmt: skip
    write_json(asked.out, {"what": "compact", "settings": settings, "per_seed": per_seed, **made_by})
    print(per_seed)


if __name__ == "__main__":
    main()
