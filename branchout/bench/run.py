"""Rows on disk: run what is missing, once, whoever else runs beside us.

A row is one file; a job makes all rows of one contender in one experiment. Before it starts, a job takes a lock that
dies with its process, and looks again whether its rows are there: two runners on one folder never do the same job
twice, and a killed one leaves nothing half-written.
"""

from __future__ import annotations

import fcntl
import json
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.bench import results
from branchout.bench.contenders import Contender, Measured, contender_named, measure, why_not
from branchout.bench.experiment import Experiment, Plan
from branchout.data.benchmarks import resolve
from branchout.errors import BranchoutError
from branchout.metrics import average_over_steps, incremental
from branchout.train.loop import Report, silent
from branchout.train.recipes import recipe_named


@dataclass(frozen=True)
class Job:
    """One contender in one experiment."""

    data: str
    dataset: str
    """The dataset's name in results."""
    table: str
    plan: Plan
    contender: str
    seeds: tuple[int, ...]
    out: Path

    @property
    def folder(self) -> Path:
        table = self.table if self.plan.split == 1 else f"{self.table}-split{self.plan.split}"
        return self.out / self.dataset / table / self.plan.arch

    def files(self) -> dict[str, Path]:
        """The file of each operating point."""
        points = contender_named(self.contender).points()
        return {point: self.folder / f"{self.contender}-{point}.json" for point in points}

    def missing(self) -> list[str]:
        return [point for point, path in self.files().items() if not path.exists()]


@dataclass(frozen=True)
class Done:
    """How a job ended: the files it wrote, or why there are none."""

    job: Job
    written: tuple[Path, ...] = ()
    why_not: str = ""


def run_all(
    jobs: Sequence[Job],
    *,
    executor: Executor | None = None,
    report: Report = silent,
    on_done: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Run every job whose rows are not all there: here, or on the workers of an executor."""
    if executor is None:
        opened: dict[tuple[str, Plan], Experiment] = {}
        finished: list[Done] = []
        # First what nobody else is at, then what others were at: it is there by now, or they were stopped.
        for wait in (False, True):
            ended = {done.job for done in finished}
            for job in jobs:
                done = None if job in ended else run(job, opened, report, wait=wait)
                if done is not None:
                    finished.append(done)
                    on_done(done)
        return finished
    finished = []
    for future in as_completed([executor.submit(run, job) for job in jobs]):
        done = future.result()
        assert done is not None  # having waited
        finished.append(done)
        on_done(done)
    return finished


def run(
    job: Job, opened: dict[tuple[str, Plan], Experiment] | None = None, report: Report = silent, *, wait: bool = True
) -> Done | None:
    """Make the rows of one job that are missing; without `wait`, None if somebody else is making them.

    `opened` keeps experiments between jobs.
    """
    if not job.missing():
        return Done(job)
    with locked(job.folder / f".{job.contender}.lock", wait) as mine:
        if not mine:
            return None
        missing = job.missing()  # somebody may have made them while we waited
        if not missing:
            return Done(job)
        opened = {} if opened is None else opened
        if (job.data, job.plan) not in opened:
            opened.clear()  # one experiment's pictures and models at a time
            opened[job.data, job.plan] = Experiment(job.plan, resolve(job.data), report=report)
        experiment = opened[job.data, job.plan]
        contender = contender_named(job.contender)
        reason = why_not(contender, experiment.scenario.space)
        if reason:
            return Done(job, why_not=reason)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            measured = measure(contender, experiment, job.seeds)
        except BranchoutError as error:  # an idea that this base does not allow, such as adapters without a ViT
            return Done(job, why_not=str(error))
        written = [
            results.write(job.folder, path.stem, row(job, contender, experiment, measured, point))
            for point, path in job.files().items()
            if point in missing
        ]
        return Done(job, tuple(written))


def row(job: Job, contender: Contender, experiment: Experiment, measured: Measured, point: str) -> dict[str, Any]:
    """One operating point of one contender, as results have it."""
    plan, space = job.plan, experiment.scenario.space
    per_seed = measured.points[point]
    last = [steps[-1] for steps in per_seed]
    means, spreads = results.averaged([scored.test for scored in last])
    prefix = "dial-" if point.startswith("dial-") else ""
    folds = {
        goal: results.percent(float(np.mean([steps[-1].two_fold for steps in measured.points[prefix + goal]])))
        for goal in ("all", "balanced", "avg")
        if prefix + goal in measured.points
    }
    chosen = [scored.setting for scored in last]
    before = experiment.before()
    steps_of = [[before, *(scored.test for scored in steps)] for steps in per_seed]
    over_steps = {
        "incremental": results.percent(float(np.mean([incremental(steps) for steps in steps_of]))),
        "avg_steps": results.percent(float(np.mean([average_over_steps(steps) for steps in steps_of]))),
    }
    return {
        "dataset": job.dataset,
        "table": job.table,
        "scenario": plan.scenario,
        "base_classes": len(space.branches[0]),
        "novel_classes": len(space.classes) - len(space.branches[0]),
        "overlap_classes": len(space.overlap),
        "steps": experiment.steps,
        "arch": plan.arch,
        "method": contender.method,
        "label": contender.label,
        "recipe": contender.recipe,
        "point": point,
        "dial": bool(chosen[0]) and len(chosen[0]) == 1,
        "alpha": [each[0] for each in chosen] if len(chosen[0]) == 2 else None,
        "beta": [each[1] for each in chosen] if len(chosen[0]) == 2 else None,
        "b": [each[0] for each in chosen] if len(chosen[0]) == 1 else None,
        "metrics": {**means, **(over_steps if experiment.steps > 1 else dict.fromkeys(over_steps))},
        "two_fold": folds or None,
        "two_fold_spread": results.percent(float(np.mean([scored.spread for scored in last]))),
        "std": spreads,
        "seeds": list(job.seeds)[: len(per_seed)],
        "per_seed": [results.figures(scored.test) for scored in last],
        "per_step": [[results.figures(scored.test) for scored in steps] for steps in per_seed]
        if experiment.steps > 1
        else None,
        "base_model": results.percent(before.all),
        **{name: results.percent(value) for name, value in measured.extra.items()},
        "curve": measured.curve or None,
        "parameters": measured.parameters,
        "seconds": {**measured.seconds},
        "peak_memory_bytes": peak_memory(),
        "settings": {
            **asdict(plan),
            "recipe": asdict(recipe_named(contender.recipe)) if contender.recipe else None,
            "branch": contender.branch if contender.baseline is None else None,
            "pooler": contender.pooler if contender.baseline is None else None,
        },
        **results.provenance(),
    }


def peak_memory() -> int:
    """Of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock, or learn that somebody else does. It dies with its process: a killed runner blocks nobody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def stored(out: Path) -> dict[Path, dict[str, Any]]:
    """All rows under a results folder."""
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.rglob("*.json"))}
