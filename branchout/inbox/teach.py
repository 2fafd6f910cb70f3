"""Executing a run: training, or resuming what was trained, and the result before → after."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from branchout import api
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError, printable
from branchout.evaluate.compare import Comparison
from branchout.files import lock, write_json, write_text
from branchout.inbox.folder import read_as
from branchout.inbox.runs import BASE, WORKER, Part, Result, Run, Settings, runs_in
from branchout.labels import LabelSpace
from branchout.method.config import ExtendConfig
from branchout.metrics import part_of_class
from branchout.model.manifest import is_saved_model
from branchout.training.loop import OnProgress, silent
from branchout.units import count

NAMED = 5
"""Classes of a group that are named."""


def execute(
    run: Run,
    *,
    device: str | None = None,
    on_progress: OnProgress = silent,
    note: Callable[[list[str]], object] = lambda lines: None,
) -> Result:
    """Train, or resume. The result stays in the run's folder. `note` gets the `memory_notes` before the training."""
    with _exclusively(run):
        write_json(run.folder / WORKER, {"pid": os.getpid(), "host": platform.node()})  # first: `stop` waits for it
        decision = read_as(Settings, run.folder / "run.json").decision  # it may have been discarded meanwhile
        if decision is not None:
            raise BranchoutError(f"Run {run.number} is {decision} and cannot be resumed.")
        if run.result is not None:
            return run.result
        (run.folder / "error.txt").unlink(missing_ok=True)
        try:
            result = _extend(run, device, on_progress, note)
        except Exception as error:  # whatever it is, the page must be able to say why
            text = str(error) if isinstance(error, BranchoutError) else f"{type(error).__name__}: {error}"
            write_text(run.folder / "error.txt", text)
            raise
        write_json(run.folder / "result.json", result.model_dump())
        return result


@contextmanager
def _exclusively(run: Run) -> Iterator[None]:
    """The lock of a run. `Run.state` holds it for a moment too, so one failure to get it says nothing."""
    for _ in range(10):
        with lock(run.folder / "lock", wait=False) as free:
            if free:
                yield
                return
        time.sleep(0.1)
    raise BranchoutError(f"Run {run.number} is already running.")


def _extend(run: Run, device: str | None, on_progress: OnProgress, note: Callable[[list[str]], object]) -> Result:
    asked = run.settings
    new = api.samples_in(run.folder / "new")
    model = api.load(asked.model, device=device)
    kept = kept_images(model, asked.memory, asked.classes_from, run.folder.parent, before=run.number)
    test = _test_images(model, asked)
    note(memory_notes(model, kept, asked.memory))
    prepared = model.prepare(new, memory=kept, config=ExtendConfig(epochs=asked.epochs))
    if is_saved_model(run.out):  # killed after the model was saved
        grown = api.load(run.out, device=device)
    else:
        grown = model.extend_prepared(prepared, out=run.out, on_progress=on_progress)
    measured = grown.saved.history[-1].get("measured") or {"images": 0, "before": {}, "after": {}}
    split = prepared.split
    held = concatenate([part for part in (split.dev, split.test, split.calibration) if part is not None and len(part)])
    counted = _counts(grown.evaluate(held))
    tested = {} if test is None else _counts(grown.evaluate(test, on_progress=on_progress))
    answers = grown.predict([run.folder / "new" / file for file in new.ids.tolist()], top=1)
    return Result(
        images=measured["images"],
        before=_accuracies(measured["before"]),
        after=_accuracies(measured["after"]),
        photos=len(new),
        photos_right=sum(best[0][0] == name for best, name in zip(answers, new.names.tolist(), strict=True)),
        warnings=list(prepared.warnings),
        parts=_parts(grown.classifier.space, counted, tested),
        measured_on="held-out" if asked.test is None else "test",
    )


def _test_images(model: api.Model, asked: Settings) -> Samples | None:
    """The images of --test, read before the training: an error after it would come too late."""
    if asked.test is None:
        return None
    found = api.samples_in(asked.test, known=model.classes, classes_from=asked.classes_from)
    test = found.of_classes(model.classes)
    if not len(test):
        raise BranchoutError(
            f"--test {asked.test} has no images of the {len(model.classes):,} classes that the model knows. It has "
            f"{', '.join(map(printable, found.classes[:NAMED]))}. Repeat the command with another --test, or without."
        )
    return test


def _accuracies(found: Mapping[str, object]) -> dict[str, float | None]:
    return {name: value for name, value in found.items() if value is None or isinstance(value, float)}


# Before → after, counted for each part of the label space.

Counts = dict[int, tuple[int, int | None, int]]
"""By part, as `part_of_class` numbers them: images, right before (None: not known before) and right after."""


def _counts(found: Comparison) -> Counts:
    """Of images that did not train. All parts but the last step were known before."""
    assert found.before_answers is not None
    part, last = part_of_class(found.space)[found.labels], len(found.space.branches) - 1
    right, was = found.answers == found.labels, found.before_answers == found.labels
    return {
        number: (int(here.sum()), None if number == last else int(was[here].sum()), int(right[here].sum()))
        for number in np.unique(part).tolist()
        if (here := part == number).any()
    }


def _parts(space: LabelSpace, held: Counts, tested: Counts) -> list[Part]:
    """Counts with the names of their classes: a person knows a step by what it added. Those of --test come first."""
    last = len(space.branches) - 1
    names = [BASE, *(f"step {step}" for step in range(1, last)), "new classes"]
    of_class = part_of_class(space)
    parts = []
    for number, (images, before, after) in sorted((held | tested).items()):
        classes = [name for name, part in zip(space.classes, of_class, strict=True) if part == number]
        if number > last:  # known by several branches, of which the last need not be one
            recent = set(classes) <= set(space.branches[last])
            title = "classes with new photos" if recent else "classes that several steps know"
        else:
            title = names[number]
        listed = "" if number == 0 else f": {', '.join(classes[:NAMED])}" + (", …" if len(classes) > NAMED else "")
        on = "test" if number in tested else "held-out"
        parts.append(Part(title=title + listed, images=images, before=before, after=after, on=on))
    return parts


# Memory: images of classes that must not be forgotten.


def kept_images(
    model: api.Model, memory: str | None, classes_from: str | None, runs: Path, before: int | None = None
) -> Samples | None:
    """The memory folder, and the photos of runs (before a certain one) whose model went live."""
    parts = [] if memory is None else [api.samples_in(memory, known=model.classes, classes_from=classes_from)]
    for earlier in runs_in(runs):
        if earlier.settings.decision == "live" and (before is None or earlier.number < before):
            kept = api.samples_in(earlier.folder / "new").of_classes(model.classes)
            parts += [kept] if len(kept) else []
    return concatenate(parts) if parts else None


def memory_notes(model: api.Model, kept: Samples | None, memory: str | None) -> list[str]:
    """What is said before teaching about old classes of which no images are kept; nothing if there are none."""
    have = set(() if kept is None else kept.classes)
    added = [name for step in model.classifier.steps for name in step.names if name not in have]
    base = [name for name in model.classifier.space.branches[0] if name not in have and name not in added]
    place = memory or "OLD"
    add = "" if memory else " and add --memory OLD/"
    notes = []
    if added:
        some = ", ".join(map(printable, added[:NAMED])) + (", …" if len(added) > NAMED else "")
        notes.append(
            f"No images are kept of {count(len(added), 'class', 'classes')} that earlier steps added ({some}), which "
            f"may be forgotten. Put two or more of each into a folder such as {place}/{printable(added[0])}/{add}."
        )
    if base and not set(model.classifier.space.branches[0]) & have:
        notes.append(
            f"No images are kept of the {count(len(base), 'base class', 'base classes')}: whether they get worse "
            f"cannot be measured. Put two or more of each into a folder such as {place}/{printable(base[0])}/{add}."
        )
    return notes
