"""Experiments in several processes of one run (`accelerate launch -m branchout bench …`).

Where there are enough jobs, each process measures some of them, as separate programs on one results folder would. Where
there are fewer jobs than processes, each measures one exemplar seed of a job at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from branchout.bench.experiment import Experiment
from branchout.bench.job import Done, Job
from branchout.bench.measure import Measured, OnStep
from branchout.bench.methods import Method, method_named
from branchout.bench.runner import Opened, experiment_of, measure_one, run, run_all
from branchout.errors import DoesNotApply
from branchout.training import processes
from branchout.training.loop import OnProgress, silent


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
) -> Iterator[Measured]:
    """In the first process: as many seeds at a time as there are processes, one in each."""
    with processes.independent(False):
        count = processes.count()
    for start in range(0, len(seeds), count):
        own, *others = seeds[start : start + count]
        with processes.independent(False):
            processes.from_main((job, others))
        found = _measured(method, experiment, own, on_step)
        if isinstance(found, Measured):
            yield found  # before the others are waited for, so that it is kept if one of them fails
        with processes.independent(False):
            parts = processes.from_each(None if isinstance(found, Measured) else found)
        for part in parts:
            if isinstance(part, DoesNotApply):
                raise part
            if part is not None:
                yield part


def _measure_when_asked(on_progress: OnProgress) -> None:
    """In the other processes, until the first one has no more jobs."""
    opened, place = Opened(), processes.rank() - 1
    asked: tuple[Job, Sequence[int]] | None
    while (asked := processes.from_main(None)) is not None:
        job, seeds = asked
        found = None
        if place < len(seeds):
            with processes.independent():
                experiment = experiment_of(job, opened, on_progress)
                found = _measured(method_named(job.method), experiment, seeds[place])
        processes.from_each(found)


def _measured(
    method: Method, experiment: Experiment, seed: int, on_step: OnStep = lambda measured: None
) -> Measured | DoesNotApply:
    try:
        return measure_one(method, experiment, seed, on_step)
    except DoesNotApply as error:
        return error
