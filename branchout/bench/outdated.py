"""Outdated rows, the cheapest first: how long each will take, by the times in the old rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.measure import starts_from_base, uses_seeds
from branchout.bench.methods import method_named
from branchout.bench.plan import Plan
from branchout.bench.rows import read_row
from branchout.data.datasets import Dataset
from branchout.model.manifest import is_saved_model

OPENING = 10.0
"""Seconds to open another experiment: its images and its base model."""


class Forecast:
    """Expected seconds of jobs. A base model that is not on disk is trained by the first job that needs it."""

    def __init__(self, jobs: Sequence[Job], dataset: Dataset) -> None:
        self.jobs = list(jobs)
        self.rows = {job: [read_row(path) for path in job.files().values() if path.exists()] for job in jobs}
        self.hardware = sorted({row["hardware"] for rows in self.rows.values() for row in rows})
        self._base = {job.plan: _base_folder(job, dataset) for job in jobs}
        self._training = {self._base[job.plan]: _base_seconds(job) for job in jobs}
        self._opened: Plan | None = None

    def seconds(self, job: Job) -> float:
        """How long a job takes if it starts now."""
        seeds = len(job.seeds) if uses_seeds(method_named(job.method)) else 1
        own = max((sum(row["seconds"].values()) for row in self.rows[job]), default=0.0) * seeds
        return own + self._shared_training(job) + OPENING * (job.plan != self._opened)

    def _shared_training(self, job: Job) -> float:
        """Seconds to train what other jobs share: the base, or the network that a clustered split depends on."""
        place = self._base[job.plan]
        needed = place == job.scenario_file or starts_from_base(method_named(job.method), job.plan)
        if place is None or is_saved_model(place) or not needed:
            return 0.0
        return self._training.get(place, 0.0)

    def start(self, job: Job) -> None:
        """From now on the experiment of this job is open, and its base model is trained if the job needs it."""
        self._opened = job.plan
        if self._shared_training(job):
            del self._training[self._base[job.plan]]

    def cheapest_first(self) -> Iterator[tuple[Job, float]]:
        """All jobs with their seconds: next is always the one that takes the least after those before it."""
        left, training = list(self.jobs), dict(self._training)
        while left:
            job = min(left, key=self.seconds)
            yield job, self.seconds(job)
            self.start(job)
            left.remove(job)
        self._opened, self._training = None, training


class Deadline:
    """Lets a job start if it will end in time, at the pace of the jobs before it."""

    def __init__(self, forecast: Forecast, end: float) -> None:
        self.forecast, self.end = forecast, end
        self._began, self._expected = time.monotonic(), 0.0
        self.refused: set[Job] = set()

    def __call__(self, job: Job) -> bool:
        now, seconds = time.monotonic(), self.forecast.seconds(job)
        pace = max((now - self._began) / self._expected, 1.0) if self._expected else 1.0
        if now + pace * seconds > self.end:
            self.refused.add(job)
            return False
        self.refused.discard(job)
        self.forecast.start(job)
        self._expected += seconds
        return True


def _base_folder(job: Job, dataset: Dataset) -> Path | None:
    """Where the base model of a job is kept once it is trained; None if it is a saved one."""
    experiment = Experiment(job.plan, dataset, scenario_file=job.scenario_file)
    if experiment.saved_base is not None and job.plan.kept is None:
        return None
    if experiment.scenario_file is not None and not experiment.scenario_file.exists():
        return experiment.scenario_file  # the split depends on a network that is not trained yet either
    train = experiment.scenario.train(dataset)
    return experiment.folder_of(train.select(train.origin == 0))[0]


def _base_seconds(job: Job) -> float:
    """How long the base model trains: its share of the classes of joint training, which has the same schedule."""
    joint = job.folder / "joint-plain.json"
    if not joint.exists():
        return 0.0
    row = read_row(joint)
    classes = row["base_classes"] + row["novel_classes"] - row["overlap_classes"]
    return float(row["seconds"]["train"] * row["base_classes"] / classes)
