"""Compare ways to extend a strong base on anyone's photos: `branchout bench photos --new … --memory … --test …`.

One row for each method on the same base and images. Without test images, a fifth of the new and old ones is held out
first. Operating points of Branchout and of logistic regression are chosen as `branchout extend` chooses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from branchout.api.model import Model
from branchout.baselines.networks import scores_of
from branchout.baselines.registry import baselines
from branchout.baselines.task import Ints, Task
from branchout.bench.rows import provenance, write
from branchout.data.images import Gallery
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.method.choose import apply_fusion
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension
from branchout.method.features import extract, predictions
from branchout.method.split import DataSplit
from branchout.metrics import Accuracies, accuracies
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import Branch, branch_point
from branchout.training.loop import Event, Report, silent

HELD_OUT = 0.2


@dataclass(frozen=True)
class Case:
    """A base and the images of one comparison."""

    base: Model
    new: Samples
    old: Samples
    test: Samples
    report: Report = silent

    @classmethod
    def of(cls, base: Model, new: Samples, old: Samples, test: Samples | None, report: Report = silent) -> Case:
        steps = len(base.classifier.steps)
        if steps:
            raise BranchoutError(
                f"--base has learned {steps} step{'s' if steps > 1 else ''} already, and the other methods start from "
                "a base without steps: give the model that it was extended from"
            )
        told = "--test" if test is not None else "--memory"
        if test is None:
            (new, some), (old, others) = (_hold_out(samples) for samples in (new, old))
            test = concatenate([some, others])
        unknown = sorted(set(test.classes) - set(base.classes) - set(new.classes))
        if unknown:
            raise BranchoutError(f"{told} has images of {unknown[0]!r}, which neither the base nor --new has")
        return cls(base, new, old, test, report)

    @cached_property
    def task(self) -> Task:
        model = self.base.classifier
        gallery = Gallery(model.preprocessing, self.base.device)
        return Task(
            space=model.space.extend(self.new.classes),
            new=self.new.placed(len(model.space.branches)),
            memory=self.old.placed(0),
            images=gallery.images,
            kind=model.kind,
            size=model.preprocessing.size,
            per_class=max(self.old.counts().values()),
            device=self.base.device,
            report=self.report,
        )

    def measured(self, answers: Ints) -> Accuracies:
        return accuracies(answers, self.task.labels(self.test), self.task.space)

    def before(self) -> float:
        """Accuracy of the base on test images of classes that only it knows, in percent."""
        old = self.test.of_classes([name for name in self.test.classes if name not in set(self.new.classes)])
        if not len(old):
            raise BranchoutError(
                "no test image is of a class that only the base knows: add some to --test; without --test a fifth of "
                "--memory is held out, which takes two images of a class"
            )
        right = _predicted(self.base.classifier, self, old) == self.base.classifier.space.index(old.classes)[old.labels]
        return round(100 * float(right.mean()), 2)


def _hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """Samples without a fifth of each class, and that fifth; a single image of a class stays."""
    rng = np.random.default_rng(0)
    held = np.zeros(len(samples), dtype=bool)
    for label in np.unique(samples.labels):
        members = rng.permutation(np.flatnonzero(samples.labels == label))
        held[members[: min(max(round(HELD_OUT * len(members)), 1), len(members) - 1)]] = True
    return samples.select(~held), samples.select(held)


def _predicted(model: Classifier, case: Case, samples: Samples) -> Ints:
    images = case.task.images(samples)
    return predictions(model, extract(model, images, device=case.base.device, report=case.report)[0])


def _extended(case: Case, seed: int, *, memory: bool = True, branch: str = "last") -> Ints:
    if branch == "deeper":
        branch = case.base.classifier.backbone.names[-2]
    old = case.old if memory else None
    model = case.base.extend(case.new, memory=old, branch=branch, seed=seed, report=case.report)
    return _predicted(model.classifier, case, case.test)


def _baseline(case: Case, seed: int, *, name: str) -> Ints:
    scorer = baselines()[name].learn(case.base.classifier, replace(case.task, seed=seed))
    return scores_of(scorer, case.task.images(case.test)).argmax(1).cpu().numpy()


def _logistic_regression(case: Case, seed: int) -> Ints:
    """The usual alternative: logistic regression on frozen features beside the old logits, with one bias."""
    from sklearn.linear_model import LogisticRegression

    if len(case.new.classes) < 2:
        raise BranchoutError("logistic regression tells new classes apart and needs two; --new has one")
    base, device = case.base.classifier, case.base.device
    split = DataSplit.of(base.space, case.new, case.old, None, seed)
    extension = Extension(base, split, ExtendConfig(seed=seed), device=device, report=case.report)
    features = extension.features(base, split.new)[0, :, 0]
    fitted = LogisticRegression(C=1.0, max_iter=500).fit(features.cpu().numpy(), split.new.labels)
    rows, bias = fitted.coef_, fitted.intercept_
    if len(rows) == 1:  # two classes: one row, for the second
        rows, bias = np.concatenate([-rows, rows]) / 2, np.concatenate([-bias, bias]) / 2
    head = nn.Linear(features.shape[1], len(split.new.classes)).to(device)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(rows))
        head.bias.copy_(torch.from_numpy(bias))
    point = branch_point(base.backbone, "fc")
    model = base.extended(Step(split.new.classes, "fc", point.start, Branch.clone(base.backbone, point), head))
    fusion, *_ = extension.choose(model.to(device), None)
    apply_fusion(model, fusion)
    return _predicted(model, case, case.test)


METHODS: Mapping[str, Callable[[Case, int], Ints]] = {
    "default": _extended,
    "no-memory": partial(_extended, memory=False),
    "fc": partial(_extended, branch="fc"),
    "deeper": partial(_extended, branch="deeper"),
    "fine-tuning": partial(_baseline, name="finetune-exemplars"),
    "logistic-regression": _logistic_regression,
    "nearest-class-mean": partial(_baseline, name="ncm"),
    "ranpac": partial(_baseline, name="ranpac"),
}


def run(
    case: Case, methods: Sequence[str], seeds: Sequence[int], out: Path, base: str, name: str
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Measure each method, write its row below the names of data and base, and yield its name with the row, or with
    the reason why there is none."""
    before, about = case.before(), provenance()
    for method in methods:
        per_seed, seconds = [], []
        try:
            for done, seed in enumerate(seeds):
                case.report(Event(f"Measuring {method}, seeds", done, len(seeds)))
                start = time.perf_counter()
                found = case.measured(METHODS[method](case, seed))
                seconds.append(round(time.perf_counter() - start, 1))
                figures = {key: getattr(found, key) for key in ("base", "novel", "overlap", "all", "avg")}
                shown = {key: round(100 * value, 2) for key, value in figures.items() if value is not None}
                per_seed.append({"seed": seed, **shown, "drop": round(before - shown["base"], 2)})
        except BranchoutError as error:
            yield method, str(error)
            continue
        row = {
            "dataset": name, "scenario": "photos", "arch": base, "method": method, "before": before,
            "base_classes": len(case.base.classes), "novel_classes": len(case.new.classes),
            "metrics": {
                key: round(float(np.mean([each[key] for each in per_seed])), 2) for key in per_seed[0] if key != "seed"
            },
            "seeds": list(seeds), "per_seed": per_seed, "seconds": seconds, "device": case.base.device.type,
            "test_images": len(case.test), "memory_images": len(case.old), **about,
        }  # fmt: skip
        suffix = "" if case.base.device.type == "cuda" else f"-{case.base.device.type}"
        write(out / name / base, f"{method}{suffix}", row)
        case.report(Event(f"Measuring {method}, seeds", len(seeds), len(seeds)))
        yield method, row
