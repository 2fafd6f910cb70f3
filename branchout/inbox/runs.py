"""Runs: an extension with the photos that were given a class. Its folder holds all that is needed to resume it.

    photos/.inbox/runs/1/run.json           settings, and whether its model went live or was discarded
    photos/.inbox/runs/1/new/robin/…        copies of the photos, as `branchout extend` takes them
    photos/.inbox/runs/1/result.json        before → after, once it is finished
    photos/.inbox/runs/1/error.txt          why it failed, if it did

`extend` itself resumes from the work folder beside its output, so a run that was killed loses nothing.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from branchout.errors import BranchoutError
from branchout.files import copy_file, lock, read_json, write_json
from branchout.inbox.folder import Decision, Inbox, Photo, now, read_as
from branchout.model.manifest import is_saved_model, read_manifest
from branchout.units import count

FEWEST = 3
"""Photos that a class needs: one is held out to measure with."""

BASE = "base classes"
CHANCE = 2
"""A loss of so many images is said to be small."""

WORKER = "worker.json"
"""The process that executes a run: `pid` and `host`."""

_LOOKING = threading.Lock()
"""Held with a run's lock by the threads that only look at it: two of them would take each other for the run."""

State = Literal["running", "stopped", "failed", "finished", "live", "discarded"]


class Settings(BaseModel):
    """What run.json holds."""

    model: str
    """The model that is extended, as `branchout.load` takes it."""
    out: str
    memory: str | None
    epochs: int | None
    classes_from: str | None = None
    """How nested folders of `memory` and `test` are read."""
    test: str | None = None
    """Labelled images of known classes to compare both models on."""
    when: str
    classes: dict[str, int] = {}
    """How many photos each class has."""
    photos: list[str] = []
    """Ids of the photos."""
    decision: Literal["live", "discarded"] | None = None
    """What a person decided about the finished model."""


COMPARED = ("model", "out", "memory", "epochs", "classes_from")  # an old run.json has no `test`
"""The settings that make two runs the same."""


class Part(BaseModel):
    """Images of one group of classes, and how many of them are answered right."""

    title: str
    """Such as `base classes`, or `step 1: robin, wren`."""
    images: int
    before: int | None
    """None for classes that the earlier model does not know."""
    after: int
    on: str | None = None
    """`test` if the images are those of --test, else `held-out`; None in older results."""

    def __str__(self) -> str:
        arrow = "" if self.before is None else f"{self.before:,} → "
        return f"{self.title}: {arrow}{self.after:,} of {count(self.images, 'image')} right"


class Result(BaseModel):
    """What the new model answers right, and the earlier one; accuracies are shares between 0 and 1."""

    images: int
    """Held-out images that the accuracies were measured on."""
    before: dict[str, float | None]
    after: dict[str, float | None]
    photos: int
    photos_right: int
    """Of the photos of this run, nearly all of which the model was trained with."""
    warnings: list[str]
    parts: list[Part] = []
    """The base classes, those of each step, and classes that several steps know."""
    measured_on: str = "held-out"
    """`test` if the images of old classes are those of --test, else `held-out`."""

    def verdict(self) -> str:
        """Whether old classes got worse, in a sentence or two."""
        old = [part for part in self.parts if part.before is not None]
        worse = [part for part in old if part.after < (part.before or 0)]
        if not old:
            return "Whether old classes got worse was not measured: no images of them were held out (--memory, --test)."
        if worse:
            said = f"Old classes got worse: {'; '.join(map(str, worse))}."
            if all((part.before or 0) - part.after <= CHANCE for part in worse):
                said += " That is few images: it may be chance."
        else:
            said = f"Old classes did not get worse: {'; '.join(map(str, old))}."
        return said if self.parts[0].title == BASE else f"{said} The {BASE} were not measured."


@dataclass(frozen=True)
class Run:
    """One run in its folder."""

    folder: Path
    settings: Settings

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def out(self) -> Path:
        return Path(self.settings.out)

    @property
    def result(self) -> Result | None:
        file = self.folder / "result.json"
        return read_as(Result, file) if file.exists() else None

    @property
    def error(self) -> str | None:
        file = self.folder / "error.txt"
        return file.read_text(encoding="utf-8") if file.exists() else None

    def state(self) -> State:
        if self.settings.decision is not None:
            return self.settings.decision
        with _LOOKING, lock(self.folder / "lock", wait=False) as free:
            if not free:
                return "running"
        if self.result is not None:
            return "finished"
        return "failed" if self.error is not None else "stopped"


# Which photos are taught.


def runs(inbox: Inbox) -> list[Run]:
    """All runs, the oldest first. One whose run.json was not written yet does not count."""
    return runs_in(inbox.state / "runs")


def runs_in(folder: Path) -> list[Run]:
    found = [Run(file.parent, read_as(Settings, file)) for file in folder.glob("*/run.json")]
    return sorted(found, key=lambda run: run.number)


def open_run(inbox: Inbox) -> Run | None:
    """The run that is not decided about yet: there is at most one."""
    return next((run for run in runs(inbox) if run.settings.decision is None), None)


def taught(inbox: Inbox, known: Collection[str] | None = None) -> set[str]:
    """Photos that a live model was trained with. With `known`, the classes of a model: those it has learned too."""
    return {
        photo
        for run in runs(inbox)
        if run.settings.decision == "live" and (known is None or set(run.settings.classes) <= set(known))
        for photo in run.settings.photos
    }


def known_classes(model: str | None) -> set[str] | None:
    """The classes of a saved model, without importing torch; None for any other."""
    if model is None or not is_saved_model(Path(model)):
        return None
    return {name for names in read_manifest(Path(model))[0].classes for name in names}


WHAT_TO_DO: Mapping[State, str] = {
    "running": "Wait until it ends, or stop it; then use its model, resume it or discard it",
    "stopped": "Resume or discard it first",
    "failed": "Resume or discard it first",
    "finished": "Use its model or discard it first",
}
"""With the open run, by its state."""


class UndecidedRunError(BranchoutError):
    """The model of a run must be used or discarded first."""

    def __init__(self, run: Run, why: str = "") -> None:
        self.run, state = run, run.state()
        told = "has failed" if state == "failed" else f"is {state}"
        super().__init__(f"{why}Run {run.number} into {run.out.name} {told}. {WHAT_TO_DO[state]}.")


def check_free(inbox: Inbox, photos: Iterable[Photo], known: Collection[str] | None = None) -> None:
    """Raise if a run has copied some of these photos: another decision about them would have no effect."""
    chosen = {photo.id for photo in photos}
    run = open_run(inbox)
    if run is not None and (count := len(chosen & set(run.settings.photos))):
        raise UndecidedRunError(run, f"{count} of these photos {'is' if count == 1 else 'are'} part of a run. ")
    if count := len(chosen & taught(inbox, known)):
        raise BranchoutError(f"{count} of these photos were taught already; their class cannot be changed here.")


def last_decision(inbox: Inbox, known: Collection[str] | None = None) -> list[Decision]:
    """What was decided last and can be undone: photos in the folder that were decided about at the same time."""
    run = open_run(inbox)
    fixed = taught(inbox, known) | set(() if run is None else run.settings.photos)
    free = {photo.id for photo in inbox.photos()} - fixed
    found = [each for photo, each in inbox.decisions().items() if photo in free]
    return [each for each in found if each.when == found[-1].when]


def live_model(inbox: Inbox) -> str | None:
    """The model that went live last."""
    return next((run.settings.out for run in reversed(runs(inbox)) if run.settings.decision == "live"), None)


def ready(
    inbox: Inbox, known: Collection[str] | None = None
) -> tuple[dict[str, list[Decision]], dict[str, list[Decision]]]:
    """Decided photos by class: the classes that have enough of them, and those that wait for more."""
    free = {photo.id for photo in inbox.photos()} - taught(inbox, known)
    decided: dict[str, list[Decision]] = {}
    for photo, decision in inbox.decisions().items():
        if decision.name is not None and photo in free:
            decided.setdefault(decision.name, []).append(decision)
    enough = {name: found for name, found in sorted(decided.items()) if len(found) >= FEWEST}
    return enough, {name: found for name, found in sorted(decided.items()) if name not in enough}


# Starting and running.


def plan(
    inbox: Inbox,
    model: str,
    out: Path,
    memory: Path | None,
    epochs: int | None = None,
    classes_from: str | None = None,
    test: Path | None = None,
) -> Run:
    """Write down a run with all decided photos. An unfinished run with the same settings is returned instead."""
    from branchout.training.work_folder import check_out, work_folder

    with lock(inbox.state / "lock"):
        asked = Settings(
            model=_absolute(model),
            out=str(out.absolute()),
            memory=None if memory is None else str(memory.absolute()),
            epochs=epochs,
            classes_from=classes_from,
            test=None if test is None else str(test.absolute()),
            when=now(),
        )
        unfinished = open_run(inbox)
        if unfinished is not None:
            if all(getattr(unfinished.settings, key) == getattr(asked, key) for key in COMPARED):
                if asked.test != unfinished.settings.test and unfinished.state() in ("stopped", "failed"):
                    unfinished = Run(unfinished.folder, unfinished.settings.model_copy(update={"test": asked.test}))
                    _write(unfinished)
                return unfinished
            raise UndecidedRunError(unfinished)
        enough, waiting = ready(inbox, known_classes(model))
        if not enough:
            few = ", ".join(f"{name} has {len(found)}" for name, found in waiting.items())
            raise BranchoutError(
                f"There is nothing to teach: a class needs at least {FEWEST} photos"
                + (f", and {few}." if few else ". Name a group first.")
            )
        check_out(out)
        if work_folder(out).exists():  # of another command; discarding this run would delete it
            raise BranchoutError(f"An extension into {out} is running or was stopped. Choose another name.")
        folder = inbox.state / "runs" / str(max((run.number for run in runs(inbox)), default=0) + 1)
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed while it copied
        _copy(inbox, enough, folder / "new")
        classes = {name: len(found) for name, found in enough.items()}
        photos = [decision.photo for found in enough.values() for decision in found]
        run = Run(folder, asked.model_copy(update={"classes": classes, "photos": photos}))
        _write(run)
        return run


def _copy(inbox: Inbox, classes: Mapping[str, list[Decision]], to: Path) -> None:
    here = {photo.id: photo for photo in inbox.photos()}
    for name, decisions in classes.items():
        (to / name).mkdir(parents=True)
        for decision in decisions:
            photo = here[decision.photo]
            copy_file(inbox.path(photo), to / name / f"{photo.id}{Path(photo.file).suffix.lower()}")


def start(inbox: Inbox, run: Run, *, device: str | None = None) -> subprocess.Popen[bytes]:
    """Execute a run in a process of its own. It goes on when the one that started it ends."""
    command = [sys.executable, "-m", "branchout", "inbox", str(inbox.folder.absolute()), "--resume"]
    (run.folder / WORKER).unlink(missing_ok=True)  # of an earlier process, whose number may be another's now
    with (run.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*command, *([] if device is None else ["--device", device])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def stop(run: Run) -> None:
    """Stop the process of a run. What it trained so far stays, and the run can be resumed."""
    if run.state() == "running":
        for _ in range(50):  # the process has the run's lock and is about to write its number
            if (run.folder / WORKER).exists():
                break
            time.sleep(0.1)
        worker = read_json(run.folder / WORKER)
        if worker["host"] != platform.node():
            raise BranchoutError(f"Run {run.number} runs on {worker['host']}. Stop it there.")
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(int(worker["pid"]), signal.SIGTERM)


# After it.


def accept(run: Run) -> Run:
    """Record that the new model is the one to use. Its photos count as taught."""
    if run.state() != "finished":
        raise BranchoutError(f"Run {run.number} is {run.state()}, not finished, so its model cannot be used.")
    return _decided(run, "live")


def discard(run: Run) -> Run:
    """Remove the model of a run, finished or not. The decisions about its photos stay."""
    from branchout.training.work_folder import work_folder

    if run.state() in ("running", "live", "discarded"):
        raise BranchoutError(f"Run {run.number} is {run.state()}; it cannot be discarded.")
    with _LOOKING, lock(run.folder / "lock", wait=False) as free:
        if not free:
            raise BranchoutError(f"Run {run.number} is running; it cannot be discarded.")
        (run.folder / "result.json").unlink(missing_ok=True)  # first: without a model the run is not finished any more
        shutil.rmtree(work_folder(run.out), ignore_errors=True)
        if is_saved_model(run.out):
            shutil.rmtree(run.out)
        return _decided(run, "discarded")


def _decided(run: Run, decision: Literal["live", "discarded"]) -> Run:
    done = Run(run.folder, run.settings.model_copy(update={"decision": decision}))
    _write(done)
    return done


def _write(run: Run) -> None:
    write_json(run.folder / "run.json", run.settings.model_dump())


def next_name(model: str) -> Path:
    """A free name beside a model for the next one: v2 → v3."""
    from branchout.training.work_folder import work_folder

    place = Path(model)
    if not place.name or not is_saved_model(place):
        place = Path("v1")
    found = re.fullmatch(r"(.*?)(\d+)", place.name)
    stem, number = (found[1], int(found[2])) if found else (f"{place.name}-", 1)
    while True:
        number += 1
        free = place.with_name(f"{stem}{number}")
        if not free.exists() and not work_folder(free).exists():
            return free


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if is_saved_model(Path(model)) else model
