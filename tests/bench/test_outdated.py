"""Outdated rows are measured again the cheapest first, and none is started that would end too late."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import BASE, NEW

from branchout.bench import outdated
from branchout.bench.job import Job
from branchout.bench.outdated import OPENING, Deadline, Forecast
from branchout.bench.plan import Plan
from branchout.data.datasets import Dataset
from branchout.data.samples import Samples
from branchout.model.manifest import MANIFEST

PLAN = Plan("disjoint", base=8, novel=3, width=8, size=32)
OTHER = replace(PLAN, base=7, novel=4)
CLUSTERED = replace(PLAN, scenario="overlap-random-clustered", overlap=1)


@pytest.fixture
def dataset(train: Samples, val: Samples) -> Dataset:
    return Dataset("letters", train.of_classes([*BASE, *NEW]), val.of_classes([*BASE, *NEW]), "glyph")


def outdated_job(out: Path, table: str, plan: Plan, method: str, seconds: float, seeds: int = 1) -> Job:
    """A job whose rows exist and took so many seconds for each seed."""
    job = Job("letters", "letters", table, plan, method, tuple(range(seeds)), out)
    row = {"settings": {}, "seeds": [1], "metrics": {}, "hardware": "a GPU", "seconds": {"train": seconds}}
    classes = {"base_classes": plan.base, "novel_classes": plan.novel, "overlap_classes": plan.overlap}
    for path in job.files().values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**row, **classes, "outdated": "its means"}))
    return job


def test_the_cheapest_job_comes_next_and_the_first_of_an_experiment_trains_its_base(
    dataset: Dataset, tmp_path: Path
) -> None:
    slow = outdated_job(tmp_path, "one", PLAN, "ranpac", 40.0, seeds=3)
    quick = outdated_job(tmp_path, "one", PLAN, "ncm", 5.0)
    joint = outdated_job(tmp_path, "one", PLAN, "joint", 110.0)
    other = outdated_job(tmp_path, "two", OTHER, "ncm", 30.0)
    seedless = outdated_job(tmp_path, "one", PLAN, "stage-one-dial", 115.0, seeds=3)  # one result, whatever the seeds
    forecast = Forecast([slow, seedless, joint, other, quick], dataset)
    base = 110 * 8 / 11
    expected = [(other, 30 + OPENING), (quick, 5 + base + OPENING), (joint, 110), (seedless, 115), (slow, 120)]
    found = list(forecast.cheapest_first())
    assert [job for job, _ in found] == [job for job, _ in expected]
    assert [seconds for _, seconds in found] == pytest.approx([seconds for _, seconds in expected])
    assert forecast.seconds(quick) == pytest.approx(5 + base + OPENING)  # planning has trained nothing
    forecast.start(slow)
    assert forecast.seconds(quick) == 5
    assert forecast.hardware == ["a GPU"]


def test_a_base_on_disk_is_not_trained(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "cache"))
    outdated_job(tmp_path, "one", PLAN, "joint", 110.0)
    job = outdated_job(tmp_path, "one", PLAN, "wa", 20.0)
    assert Forecast([job], dataset).seconds(job) == pytest.approx(20 + 110 * 8 / 11 + OPENING)
    place = outdated._base_folder(job, dataset)
    assert place is not None
    place.mkdir(parents=True)
    (place / MANIFEST).write_text("{}")
    assert Forecast([job], dataset).seconds(job) == 20 + OPENING


def test_joint_training_needs_no_base_and_leaves_it_to_the_next_method(dataset: Dataset, tmp_path: Path) -> None:
    joint, other = (outdated_job(tmp_path, "one", PLAN, name, 110.0) for name in ("joint", "wa"))
    forecast = Forecast([joint, other], dataset)
    assert forecast.seconds(joint) == 110 + OPENING
    forecast.start(joint)
    assert forecast.seconds(other) == pytest.approx(110 + 110 * 8 / 11)


def test_a_split_that_is_not_drawn_yet_trains_nothing_for_its_forecast(dataset: Dataset, tmp_path: Path) -> None:
    job = outdated_job(tmp_path, "one", CLUSTERED, "joint", 100.0)
    assert Forecast([job], dataset).seconds(job) == pytest.approx(100 + 100 * 8 / 10 + OPENING)


def test_no_job_starts_that_would_end_too_late_at_the_pace_so_far(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [outdated_job(tmp_path, "one", PLAN, name, 20.0) for name in ("ncm", "fecam", "ranpac")]
    clock = [0.0]
    monkeypatch.setattr(outdated.time, "monotonic", lambda: clock[0])
    deadline = Deadline(Forecast(jobs, dataset), end=105.0)
    assert deadline(jobs[0])
    clock[0] = 60.0  # twice what it should take
    assert deadline(jobs[1])  # 60 + 2·20 is in time
    clock[0] = 80.0
    assert not deadline(jobs[2])
    assert deadline.refused == {jobs[2]}
