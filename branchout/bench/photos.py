"""Compare ways to extend a strong base on anyone's photos: `branchout bench photos --new … --memory … --test …`.

One row for each method on the same base and images. Without test images, a fifth of the new and old ones is held out
first. Every operating point is chosen with held-out images of --new and --memory, as `branchout extend` chooses it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.api.model import Model
from branchout.bench.peak_memory import forget_peak_memory, peak_of_process
from branchout.bench.photo_methods import METHODS, Answers, Case, last_classes
from branchout.bench.rows import provenance, read_row, write
from branchout.data.samples import Samples, concatenate, digest
from branchout.errors import BranchoutError
from branchout.evaluate.two_fold import stratified_halves
from branchout.labels import Ints
from branchout.method.dial import dial_frontier, predict, step_offsets, with_bias
from branchout.method.features import predictions
from branchout.method.running.effort import CPU_BATCH, Effort
from branchout.training.device import wait_for
from branchout.training.loop import Event, OnProgress, silent

HELD_OUT = 0.2


def open_case(
    base: Model,
    new: Samples,
    old: Samples,
    test: Samples | None,
    effort: Effort | None = None,
    on_progress: OnProgress = silent,
) -> Case:
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
    if set(test.classes) <= set(new.classes):
        raise BranchoutError(
            "no test image is of a class that only the base knows: add some to --test; without --test a fifth of "
            "--memory is held out, which takes two images of a class"
        )
    return Case(base, new, old, test, effort, on_progress)


def _hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """Samples without a fifth of each class, and that fifth; a single image of a class stays."""
    rng = np.random.default_rng(0)
    held = np.zeros(len(samples), dtype=bool)
    for label in np.unique(samples.labels):
        members = rng.permutation(np.flatnonzero(samples.labels == label))
        held[members[: min(max(round(HELD_OUT * len(members)), 1), len(members) - 1)]] = True
    return samples.select(~held), samples.select(held)


def parse_effort(text: str) -> Effort:
    """`views=8,exemplar_views=2,exemplar_share=0.5,epochs=20`: the others are as on a CPU."""
    kinds = {each.name: float if each.name == "exemplar_share" else int for each in fields(Effort)}
    given: dict[str, Any] = {"stops": True, "compressed": True, "batch": CPU_BATCH}
    try:
        for part in text.split(","):
            name, value = part.split("=")
            given[name] = kinds[name](value)
        return Effort(**{**given, **{name: bool(given[name]) for name in ("stops", "compressed")}})
    except (KeyError, ValueError, TypeError):
        raise BranchoutError(
            f"--plan takes views=… and any of {', '.join(kinds)}, such as views=8,exemplar_views=2,epochs=20; "
            f"found {text!r}"
        ) from None


def before(case: Case) -> float:
    """Accuracy of the base on test images of classes that only it knows, in percent."""
    base = case.base.classifier
    old = case.test.of_classes([name for name in case.test.classes if name not in case.new.classes])
    return _percent(predictions(base, case.features(base, old)) == old.labels_in(base.space))


def figures(case: Case, predicted: Ints, reference: float) -> dict[str, float]:
    """Accuracies in percent: `base` of classes that only the base knows, `novel` of all classes of --new, `first` of
    those that the first of two steps teaches."""
    right = predicted == case.task.labels(case.test)
    names = case.test.names
    new, first = (np.isin(names, each) for each in (case.new.classes, case.new.classes[: -last_classes(case)]))
    found = {"base": _percent(right[~new]), "all": _percent(right)}
    found |= {key: _percent(right[mask]) for key, mask in (("novel", new), ("first", first)) if mask.any()}
    found["avg"] = round((found["base"] + found.get("novel", found["base"])) / 2, 2)
    return {**found, "drop": round(reference - found["base"], 2)}


def _percent(right: np.ndarray) -> float:
    return round(100 * float(right.mean()), 2)


def two_fold(answers: Answers, labels: Ints) -> Ints:
    """Predictions where each half of the test images is predicted at the balanced point that the other half chooses."""
    first, second = stratified_halves(labels)
    predicted = np.empty_like(labels)
    for here, there in ((first, second), (second, first)):
        columns, known = answers.columns[here], labels[here]
        offsets = step_offsets(columns, known, answers.space, by_class=True)
        curve = dial_frontier(with_bias(columns, answers.space, offsets), known, answers.space, by_class=True)
        biases = offsets + curve.settings[curve.choose("balanced"), 0]
        predicted[there] = predict(answers.columns[there], answers.space, biases.tolist())
    return predicted


def measured(case: Case, method: str, seed: int, reference: float) -> dict[str, Any]:
    """One seed: accuracies, two-fold accuracies, seconds of training and peaks of memory."""
    with _empty_cache():
        forget_peak_memory()
        start = time.perf_counter()
        answer = METHODS[method](case, seed)
        wait_for(case.base.device)
        seconds = round(time.perf_counter() - start, 1)
        peak = peak_of_process()
        on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        answers = answer()
    halves = figures(case, two_fold(answers, case.task.labels(case.test)), reference)
    return {
        "seed": seed, **figures(case, answers.predicted, reference), "two_fold": halves,
        "seconds": seconds, "peak_memory_bytes": peak, "peak_gpu_memory_bytes": on_gpu,
        **({"trained": answers.trained} if answers.trained else {}),
    }  # fmt: skip


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Features and exported networks that another method has cached would make this one look faster."""
    kept = os.environ.get("BRANCHOUT_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BRANCHOUT_CACHE"] = folder
        try:
            yield
        finally:
            if kept is None:
                del os.environ["BRANCHOUT_CACHE"]
            else:
                os.environ["BRANCHOUT_CACHE"] = kept


def run(
    case: Case, methods: Sequence[str], seeds: Sequence[int], folder: Path, base: str, name: str, plan: str = ""
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Measure each method and yield its name with its row, or with the reason why there is none.

    Rows are files in `folder`, written after every seed. Seeds that a row of the same settings has are not measured
    again, but those of an unfinished row of another commit are.
    """
    reference, about = None, provenance()
    images = digest(*(each.fingerprint(portable=True) for each in (case.new, case.old, case.test)))
    for method in methods:
        label = case.base.classifier.backbone.names[-2] if method == "deeper" else method
        file = "-".join(filter(None, [label, plan, "" if case.base.device.type == "cuda" else case.base.device.type]))
        settings = {"base": base, "images": images, "plan": plan}
        row = _existing(folder / f"{file}.json", settings, seeds, about)
        per_seed = [] if row is None else row["per_seed"]
        try:
            for done, seed in enumerate(seeds):
                case.on_progress(Event(f"Measuring {label}, seeds", done, len(seeds)))
                if seed in [each["seed"] for each in per_seed]:
                    continue
                reference = before(case) if reference is None else reference
                per_seed = [*per_seed, measured(case, method, seed, reference)]
                row = {
                    "dataset": name, "scenario": "photos", "arch": base, "method": label, "before": reference,
                    **_summary(case, per_seed), "settings": settings, **about,
                }  # fmt: skip
                write(folder, file, row)
        except BranchoutError as error:
            yield label, str(error)
            continue
        case.on_progress(Event(f"Measuring {label}, seeds", len(seeds), len(seeds)))
        assert row is not None
        yield label, row


def _existing(
    path: Path, settings: dict[str, str], seeds: Sequence[int], about: dict[str, Any]
) -> dict[str, Any] | None:
    """A row of these settings that has all seeds, or some of the same commit and machine, and is not outdated."""
    if not path.exists():
        return None
    try:
        row = read_row(path)
    except BranchoutError:  # rows of older versions have no settings
        return None
    same = all(row.get(key) == about[key] for key in ("commit", "versions", "hardware"))
    if row.get("outdated"):
        return None
    return row if row["settings"] == settings and (set(seeds) <= set(row["seeds"]) or same) else None


def _summary(case: Case, per_seed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a row says about all of its seeds."""

    def means(seeds: Sequence[dict[str, float]]) -> dict[str, float]:
        keys = [key for key in ("base", "novel", "all", "first", "avg", "drop") if key in seeds[0]]
        return {key: round(float(np.mean([each[key] for each in seeds])), 2) for key in keys}

    halves = means([each["two_fold"] for each in per_seed])
    peaks = {
        key: max((each[key] for each in per_seed if each[key] is not None), default=None)
        for key in ("peak_memory_bytes", "peak_gpu_memory_bytes")
    }
    return {
        "base_classes": len(case.base.classes), "novel_classes": len(case.new.classes), "metrics": means(per_seed),
        "two_fold": {**halves, "balanced": round((halves["all"] + halves["avg"]) / 2, 2)},
        "seeds": [each["seed"] for each in per_seed], "per_seed": list(per_seed),
        "seconds": [each["seconds"] for each in per_seed], **peaks, "device": case.base.device.type,
        "test_images": len(case.test), "memory_images": len(case.old),
    }  # fmt: skip
