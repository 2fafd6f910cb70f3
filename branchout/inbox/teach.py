"""Executing a run: training, or resuming what was trained, and the result before → after."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from branchout import api
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.files import lock, write_json, write_text
from branchout.inbox.folder import read_as
from branchout.inbox.runs import WORKER, Result, Run, Settings, runs_in
from branchout.method.config import ExtendConfig
from branchout.model.manifest import is_saved_model
from branchout.training.loop import Report, silent


def execute(run: Run, *, device: str | None = None, report: Report = silent) -> Result:
    """Train, or resume. The result stays in the run's folder."""
    with _exclusively(run):
        write_json(run.folder / WORKER, {"pid": os.getpid(), "host": platform.node()})  # first: `stop` waits for it
        decision = read_as(Settings, run.folder / "run.json").decision  # it may have been discarded meanwhile
        if decision is not None:
            raise BranchoutError(f"Run {run.number} is {decision} and cannot be resumed.")
        if run.result is not None:
            return run.result
        (run.folder / "error.txt").unlink(missing_ok=True)
        try:
            result = _extend(run, device, report)
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


def _extend(run: Run, device: str | None, report: Report) -> Result:
    warnings: tuple[str, ...] = ()
    new = api.samples_in(run.folder / "new")
    if is_saved_model(run.out):  # killed after the model was saved
        grown = api.load(run.out, device=device)
    else:
        model = api.load(run.settings.model, device=device)
        prepared = model.prepare(new, memory=_memory(run, model), config=ExtendConfig(epochs=run.settings.epochs))
        warnings = prepared.warnings
        grown = model.extend_prepared(prepared, out=run.out, report=report)
    measured = grown.saved.history[-1].get("measured") or {"images": 0, "before": {}, "after": {}}
    answers = grown.predict([run.folder / "new" / file for file in new.ids.tolist()], top=1)
    return Result(
        images=measured["images"],
        before=_accuracies(measured["before"]),
        after=_accuracies(measured["after"]),
        photos=len(new),
        photos_right=sum(best[0][0] == name for best, name in zip(answers, new.names.tolist(), strict=True)),
        warnings=list(warnings),
    )


def _accuracies(found: Mapping[str, object]) -> dict[str, float | None]:
    return {name: value for name, value in found.items() if value is None or isinstance(value, float)}


def _memory(run: Run, model: api.Model) -> Samples | None:
    """The memory folder, and the photos of earlier runs: images of every class that must not be forgotten."""
    parts = (
        []
        if run.settings.memory is None
        else [api.samples_in(run.settings.memory, known=model.classes, classes_from=run.settings.classes_from)]
    )
    for earlier in runs_in(run.folder.parent):
        if earlier.settings.decision == "live" and earlier.number < run.number:
            kept = api.samples_in(earlier.folder / "new").of_classes(model.classes)
            parts += [kept] if len(kept) else []
    return concatenate(parts) if parts else None
