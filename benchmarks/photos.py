"""The real case: a strong base, someone's photos, a few old images. One row for each way to extend, and for rivals.

    python -m benchmarks.photos NEW/ OLD/ TEST/ --base efficientnet_lite0 --out results/imagenet-flowers

NEW and OLD are folders of class folders, as `branchout extend` takes them; TEST has old and new classes and is used to
report only. Every operating point is the one that `extend` chooses by itself.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import branchout
from branchout.api import Model
from branchout.api.predictor import samples_in
from branchout.bench.rows import provenance
from branchout.data.samples import Samples, concatenate
from branchout.files import write_json
from branchout.method.choose import apply_fusion
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension
from branchout.method.features import extract, predictions
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import Branch, branch_point

Ints = np.ndarray


@dataclass(frozen=True)
class Case:
    """The images of one measurement."""

    base: Model
    new: Samples
    old: Samples
    test: Samples


def extended(case: Case, seed: int, *, memory: bool = True, branch: str = "last") -> Model:
    return case.base.extend(case.new, memory=case.old if memory else None, branch=branch, seed=seed)


def two_steps(case: Case, seed: int, *, later: int = 10, kept: int = 5) -> Model:
    """All but the last ten classes, then those, with five images kept of each class of the first step."""
    first, second = case.new.classes[:-later], case.new.classes[-later:]
    model = case.base.extend(case.new.of_classes(first), memory=case.old, seed=seed)
    rng = np.random.default_rng(seed)
    of_first = case.new.of_classes(first)
    rows = [rng.permutation(np.flatnonzero(of_first.labels == n))[:kept] for n in range(len(first))]
    memory = concatenate([case.old, of_first.select(np.sort(np.concatenate(rows)))])
    return model.extend(case.new.of_classes(second), memory=memory, seed=seed)


def logistic_regression(case: Case, seed: int) -> Classifier:
    """The usual alternative: logistic regression on frozen features beside the old logits, with one bias."""
    from sklearn.linear_model import LogisticRegression

    base, device = case.base.classifier, case.base.device
    split = DataSplit.of(base.space, case.new, case.old, None, seed)
    extension = Extension(base, split, ExtendConfig(seed=seed), device=device)
    features = extension.features(base, split.new)[0, :, 0]
    fitted = LogisticRegression(C=1.0, max_iter=500).fit(features.cpu().numpy(), split.new.labels)
    head = nn.Linear(features.shape[1], len(split.new.classes)).to(device)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(fitted.coef_))
        head.bias.copy_(torch.from_numpy(fitted.intercept_))
    point = branch_point(base.backbone, "fc")
    model = base.extended(Step(split.new.classes, "fc", point.start, Branch.clone(base.backbone, point), head)).to(
        device
    )
    fusion, *_ = extension.choose(model, None)
    apply_fusion(model, fusion)
    return model


def nearest_mean(case: Case, seed: int) -> Callable[[torch.Tensor], Ints]:
    """The class whose mean feature has the largest cosine; old means are of the few images kept."""
    base = case.base.classifier
    space = base.space.extend(case.new.classes)
    sums = torch.zeros(len(space.classes), base.backbone.features, device=case.base.device)
    for samples in (case.old, case.new):
        labels = torch.from_numpy(space.index(samples.classes)[samples.labels]).to(sums.device)
        sums.index_add_(0, labels, nn.functional.normalize(features_of(base, samples, case.base)[:, 0], dim=1))
    means = nn.functional.normalize(sums, dim=1)
    return lambda features: (nn.functional.normalize(features[:, 0], dim=1) @ means.T).argmax(1).cpu().numpy()


def features_of(model: Classifier, samples: Samples, opened: Model) -> torch.Tensor:
    from branchout.data.images import open_images

    return extract(model, open_images(samples, model.preprocessing, opened.device), device=opened.device)[0]


def answers(made: Model | Classifier | Callable[[torch.Tensor], Ints], case: Case, features: torch.Tensor) -> Ints:
    """Class numbers of the test images; `features` are the base's, for methods that need no others."""
    if isinstance(made, Model):
        return predictions(made.classifier, features_of(made.classifier, case.test, made))
    if isinstance(made, Classifier):
        return predictions(made, features)
    return made(features)


METHODS: Mapping[str, Callable[[Case, int], Any]] = {
    "default": extended,
    "no-memory": lambda case, seed: extended(case, seed, memory=False),
    "fc": lambda case, seed: extended(case, seed, branch="fc"),
    "blocks.5": lambda case, seed: extended(case, seed, branch="blocks.5"),
    "two-steps": two_steps,
    "logistic-regression": logistic_regression,
    "nearest-class-mean": nearest_mean,
}


def measured(case: Case, made: Any, features: torch.Tensor, before: float) -> dict[str, float]:
    """Accuracies in percent on the test images: of old classes before and after, and of new ones."""
    space = case.base.classifier.space.extend(case.new.classes)
    labels = space.index(case.test.classes)[case.test.labels]
    right = answers(made, case, features) == labels
    new = np.isin(case.test.names, case.new.classes)
    found = {"base": right[~new].mean(), "novel": right[new].mean(), "all": right.mean()}
    first = np.isin(case.test.names, case.new.classes[:-10])
    if first.any():
        found["first"] = right[first].mean()  # the classes of the first of two steps
    figures = {name: round(100 * float(value), 2) for name, value in found.items()}
    return figures | {
        "avg": round((figures["base"] + figures["novel"]) / 2, 2),
        "drop": round(before - figures["base"], 2),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("new", "old", "test"):
        words.add_argument(name, type=Path)
    words.add_argument("--base", default="efficientnet_lite0")
    words.add_argument("--seeds", default="0,1,2")
    words.add_argument("--method", choices=list(METHODS), nargs="*", default=list(METHODS))
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--name", default="imagenet-flowers", help="name of the dataset in the rows")
    asked = words.parse_args()
    about = provenance()
    base = branchout.load(asked.base)
    case = Case(base, *(samples_in(folder) for folder in (asked.new, asked.old, asked.test)))
    features = features_of(base.classifier, case.test, base)
    old = ~np.isin(case.test.names, case.new.classes)
    known = base.classifier.space.index([n for n in case.test.classes if n in base.classes])
    labels = np.full(len(case.test.classes), -1)
    labels[[n in base.classes for n in case.test.classes]] = known
    right = predictions(base.classifier, features) == labels[case.test.labels]
    before = round(100 * float(right[old].mean()), 2)
    for name in asked.method:
        seeds, seconds = [], []
        for seed in map(int, asked.seeds.split(",")):
            start = time.perf_counter()
            made = METHODS[name](case, seed)
            seconds.append(round(time.perf_counter() - start, 1))
            seeds.append({"seed": seed, **measured(case, made, features, before)})
            print(f"{name:20} seed {seed}: old {before:.2f} → {seeds[-1]['base']:.2f}, new {seeds[-1]['novel']:.2f}, "
                  f"{seconds[-1]:.0f} s", flush=True)  # fmt: skip
        metrics = {key: round(float(np.mean([each[key] for each in seeds])), 2) for key in seeds[0] if key != "seed"}
        row = {
            "dataset": asked.name, "scenario": "photos", "arch": asked.base, "method": name, "before": before,
            "base_classes": len(base.classes), "novel_classes": len(case.new.classes), "metrics": metrics,
            "seeds": [each["seed"] for each in seeds], "per_seed": seeds, "seconds": seconds,
            "device": base.device.type, "test_images": len(case.test),
            "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, **about,
        }  # fmt: skip
        suffix = "" if base.device.type == "cuda" else f"-{base.device.type}"
        write_json(asked.out / f"{name}{suffix}.json", row)


if __name__ == "__main__":
    main()
