"""Run jobs: measure the rows that are missing, each once, however many processes share a results folder.

A job measures all rows of one method in one experiment; a row is one file. A job takes a lock, which is released when
its process dies, and then looks again whether its rows exist. So two processes never run the same job, and a killed
one leaves no incomplete row. The exemplar seeds that it has finished are in a file of their own and are used again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from functools import cache
from typing import Any

import torch

from branchout.bench import finished_seeds
from branchout.bench import rows as results
from branchout.bench.experiment import Experiment
from branchout.bench.job import Done, Job
from branchout.bench.measure import Measured, OnStep, measure, starts_from_base, uses_seeds
from branchout.bench.methods import Method, method_named
from branchout.bench.new_row import row, row_settings
from branchout.bench.peak_memory import forget_peak_memory, others_beside, peak_memory
from branchout.bench.plan import Plan
from branchout.data.datasets import resolve
from branchout.data.samples import digest
from branchout.errors import DoesNotApply
from branchout.files import lock
from branchout.training.loop import Event, OnProgress, silent

_log = logging.getLogger(__name__)
Opened = dict[tuple[str, Plan], Experiment]
"""The last experiment, with what its jobs have trained, by its data and plan."""
MeasureSeeds = Callable[[Method, Experiment, Sequence[int], OnStep], Iterator[Measured]]
"""Measures a method with each of several seeds, in their order."""
_OPENED: Opened = {}
"""That of a worker, for its next group of jobs."""
_ALONE = threading.Lock()
"""Jobs of one process run one at a time: they share torch's random number generator."""


def run_all(
    jobs: Sequence[Job],
    *,
    executor: Executor | None = None,
    workers: int = 1,
    on_progress: OnProgress = silent,
    on_done: Callable[[Done], None] = lambda done: None,
    may_start: Callable[[Job], bool] = lambda job: True,
) -> list[Done]:
    """Run every job with missing rows: in this process, or on the `workers` of an executor.

    Rows that were measured with other settings are found before anything is trained. `may_start` is asked before each
    job of this process.
    """
    missing = [job for job in jobs if job.missing()]
    if executor is None:
        opened: Opened = {}
        finished: list[Done] = []
        # First the jobs that no other process runs, then the others: they are finished by now, or were stopped.
        for wait in (False, True):
            ended = {done.job for done in finished}
            for job in jobs:
                done = run(job, opened, on_progress, wait=wait) if job not in ended and may_start(job) else None
                if done is not None:
                    finished.append(done)
                    on_done(done)
        return finished
    finished = [Done(job) for job in jobs if job not in missing]
    for future in as_completed([executor.submit(run_group, group) for group in grouped(missing, workers)]):
        for done in future.result():
            finished.append(done)
            on_done(done)
    return finished


def grouped(jobs: Sequence[Job], workers: int) -> list[list[Job]]:
    """Whole experiments if there are enough of them for all workers, else single jobs.

    A worker opens an experiment, and trains what its jobs share, once; two workers of one experiment both do.
    """
    groups: dict[tuple[str, Plan], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.data, job.plan), []).append(job)
    return list(groups.values()) if len(groups) >= workers else [[job] for job in jobs]


def run_group(jobs: Sequence[Job]) -> list[Done]:
    """Run jobs one after the other in a worker; a worker with several threads runs one group at a time."""
    with _ALONE:
        return [done for done in (run(job, _OPENED) for job in jobs) if done is not None]


def experiment_of(job: Job, opened: Opened, on_progress: OnProgress = silent) -> Experiment:
    """The job's experiment. `opened` holds the last one, with the images and models that its jobs share."""
    if (job.data, job.plan) not in opened:
        opened.clear()
        opened[job.data, job.plan] = Experiment(
            job.plan, resolve(job.data), scenario_file=job.scenario_file, on_progress=on_progress
        )
    return opened[job.data, job.plan]


def one_by_one(method: Method, experiment: Experiment, seeds: Sequence[int], on_step: OnStep) -> Iterator[Measured]:
    for seed in seeds:
        yield measure_one(method, experiment, seed, on_step)


def measure_one(method: Method, experiment: Experiment, seed: int, on_step: OnStep = lambda measured: None) -> Measured:
    """One seed, with the memory it takes and whether other processes used the GPU meanwhile."""
    forget_peak_memory()
    shared = others_beside()
    measured = measure(method, experiment, seed, on_step)
    measured.gpu_shared, measured.peak_memory = shared or others_beside(), peak_memory()
    return measured


def run(
    job: Job,
    opened: Opened,
    on_progress: OnProgress = silent,
    *,
    wait: bool = True,
    measured_by: MeasureSeeds = one_by_one,
) -> Done | None:
    """Measure the missing rows of one job; without `wait`, None if another process is measuring them."""
    if not job.missing():
        return Done(job)
    with lock(job.folder / f".{job.method}.lock", wait=False) as free:
        if not free and not wait:
            return None
        if not free:
            on_progress(Event(f"Waiting for another process that measures {job.method}", 0, 1))
    with lock(job.folder / f".{job.method}.lock", wait=wait) as mine:
        if not mine:
            return None
        missing = job.missing()  # another process may have written them meanwhile
        if not missing:
            job.partial.unlink(missing_ok=True)  # of a process that was killed just after it wrote the rows
            return Done(job)
        experiment = experiment_of(job, opened, on_progress)
        method = method_named(job.method)
        # Before the measurement: the code may be edited while it runs for hours.
        made_by = {**results.provenance(), "command": job.command or results.command()}
        try:
            measured = _all_seeds(job, method, experiment, made_by, measured_by)
        except DoesNotApply as error:
            job.partial.unlink(missing_ok=True)
            return Done(job, why_not=str(error))
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # other processes may need it
        made = {
            path: {**row(job, method, experiment, measured, point), **made_by}
            for point, path in job.files().items()
            if point in missing
        }
        written = tuple(results.write_together(made))
        job.partial.unlink(missing_ok=True)
        return Done(job, written)


def _all_seeds(
    job: Job, method: Method, experiment: Experiment, made_by: Mapping[str, Any], measured_by: MeasureSeeds
) -> list[Measured]:
    """Each seed as it was measured: by an earlier run that was stopped, or now."""

    @cache
    def about() -> dict[str, Any]:
        return _depends_on(job, method, experiment, made_by)

    def on_step(measured: Measured) -> None:
        finished_seeds.write(job.partial, about(), finished, measured)

    seeds = job.seeds if uses_seeds(method) else job.seeds[:1]
    finished = finished_seeds.read(job.partial, about()) if job.partial.exists() else {}
    left = [seed for seed in seeds if seed not in finished]
    if len(left) < len(seeds):
        _log.info("%s resumes after %d of %d seeds.", job.method, len(seeds) - len(left), len(seeds))
    for seed, measured in zip(left, measured_by(method, experiment, left, on_step), strict=True):
        finished[seed] = measured
        finished_seeds.write(job.partial, about(), finished)
    return [finished[seed] for seed in seeds]


def _depends_on(job: Job, method: Method, experiment: Experiment, made_by: Mapping[str, Any]) -> dict[str, Any]:
    """All that a measured seed depends on, but the seed. It trains the base model if it is needed and not there."""
    train = experiment.train
    return {
        "method": job.method,
        "settings": row_settings(job, method),
        "images": digest(job.images, "\n".join(train.ids), train.origin.tobytes()),
        "base_weights": experiment.base_weights if starts_from_base(method, job.plan) else None,
        **{name: made_by[name] for name in ("versions", "hardware", "commit")},
    }
