"""Experiments in several processes of one run (`accelerate launch -m branchout bench …`).

Where there are enough jobs, each process measures some of them, as separate programs on one results folder would. Where
there are fewer jobs than processes, the exemplar seeds of each job are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from branchout.bench.experiment import Experiment
from branchout.bench.measure import Measured, OnStep, measure, uses_seeds
from branchout.bench.methods import Method, method_named
from branchout.bench.runner import Done, Job, Opened, experiment_of, run, run_all
from branchout.errors import DoesNotApply
from branchout.training import processes
from branchout.training.loop import OnProgress, silent

Item = TypeVar("Item")


def run_divided(
    jobs: Sequence[Job], *, on_progress: OnProgress = silent, on_done: Callable[[Done], None] = lambda done: None
) -> list[Done]:
    """Run every job with missing rows; returns what this process has run."""
    # They exchange jobs and accuracies only, which need no GPU; so there may be more processes than GPUs.
    processes.join(torch.device("cpu"))
    processes.choose_gpu()
    missing = processes.from_main([job for job in jobs if job.missing()])
    if len(missing) >= processes.count():
        with processes.independent():
            finished = run_all(jobs, on_progress=on_progress, on_done=on_done)
        processes.wait()
        return finished
    if not processes.is_main():
        _measure_when_asked(on_progress)
        return []
    finished, opened = [], Opened()
    for job in jobs:
        with processes.independent():
            done = run(job, opened, on_progress, measured_by=partial(_measure_together, job))
        if done is not None:
            finished.append(done)
            on_done(done)
    processes.from_main(None)
    return finished


def _measure_together(
    job: Job, method: Method, experiment: Experiment, seeds: Sequence[int], on_step: OnStep
) -> Measured:
    """In the first process: have the others measure their seeds, too, and join what all have measured."""
    with processes.independent(False):
        processes.from_main(job)
        part = processes.part()
    found = _own_seeds(method, experiment, seeds, part)
    with processes.independent(False):
        parts = processes.from_each(found)
    return joined(parts)


def _measure_when_asked(on_progress: OnProgress) -> None:
    """In the other processes, until the first one has no more jobs."""
    opened, part = Opened(), processes.part()
    job: Job | None
    while (job := processes.from_main(None)) is not None:
        with processes.independent():
            found = _own_seeds(method_named(job.method), experiment_of(job, opened, on_progress), job.seeds, part)
        processes.from_each(found)


def _own_seeds(
    method: Method, experiment: Experiment, seeds: Sequence[int], part: tuple[int, int]
) -> Measured | DoesNotApply | None:
    """What this process measures: its share of the seeds, or everything in the first process if there is one result."""
    own = (seeds if uses_seeds(method) else seeds[:1])[part[0] :: part[1]]
    try:
        return measure(method, experiment, own) if own else None
    except DoesNotApply as error:
        return error


def joined(parts: Sequence[Measured | DoesNotApply | None]) -> Measured:
    """What the processes have measured, with the seeds in their order; times are those of the first process."""
    found: list[Measured] = []
    for part in parts:
        if isinstance(part, DoesNotApply):
            raise part
        found += [] if part is None else [part]
    whole = found[0]
    whole.points = {point: _in_turn([each.points[point] for each in found]) for point in whole.points}
    whole.first = _in_turn([each.first for each in found])
    return whole


def _in_turn(lists: Sequence[Sequence[Item]]) -> list[Item]:
    """The first items of all lists, then the second ones, …"""
    longest = max(map(len, lists))
    return [each[n] for n in range(longest) for each in lists if n < len(each)]
