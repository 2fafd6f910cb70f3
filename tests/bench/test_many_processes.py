"""Several processes measure what one measures, each a part of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_processes import in_processes
from test_runner import PLAN, folder, job  # noqa: F401 – a fixture

from branchout.bench import finished_seeds, many_processes, runner
from branchout.bench import measure as measuring
from branchout.bench.job import Job
from branchout.bench.many_processes import run_divided
from branchout.bench.runner import run_all
from branchout.training import processes


def rows(out: Path) -> dict[str, Any]:
    """What was measured, without times and places."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.rglob("*.json")) if "-" in path.stem}
    return {
        name: {key: row[key] for key in ("metrics", "per_seed", "seeds", "std", "two_fold", "parameters")}
        for name, row in found.items()
    }


def measured_here(jobs: list[Job], together: bool) -> list[tuple[str, int]]:
    """Run the jobs, and return which method this process has measured with which seed."""
    found: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_dial", "_baseline"):
            original = getattr(measuring, name)

            def noted(method: Any, *others: Any, original: Any = original, name: str = name) -> Any:
                found.append((name, others[-2]))
                return original(method, *others)

            patch.setattr(measuring, name, noted)
        (run_divided if together else run_all)(jobs)
    return found


def test_seeds_of_one_job_are_divided(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    def jobs(out: str) -> list[Job]:
        return [job(folder, tmp_path / out, "score-fusion-branchout", seeds=(2, 1))]

    (alone,) = in_processes(1, partial(measured_here, jobs("one"), together=False))
    first, second = in_processes(2, partial(measured_here, jobs("two"), together=True))
    assert alone == [("_dial", 2), ("_dial", 1)]
    assert first == [("_dial", 2)]
    assert second == [("_dial", 1)]
    assert rows(tmp_path / "one")
    assert rows(tmp_path / "two") == rows(tmp_path / "one")


def test_a_stopped_run_is_continued_by_several_processes(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BRANCHOUT_COMMIT", "one")

    def jobs(out: str) -> list[Job]:
        return [job(folder, tmp_path / out, "score-fusion-branchout", seeds=(3, 1, 2))]

    def stopped() -> None:
        original = runner.measure

        def measure(method: Any, experiment: Any, seed: int, on_step: Any) -> Any:
            if seed == 1:
                raise KeyboardInterrupt
            return original(method, experiment, seed, on_step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "measure", measure)
            run_all(jobs("two"))

    in_processes(1, partial(measured_here, jobs("one"), together=False))
    in_processes(1, stopped)
    first, second = in_processes(2, partial(measured_here, jobs("two"), together=True))
    assert first == [("_dial", 1)]
    assert second == [("_dial", 2)]
    assert rows(tmp_path / "one")
    assert rows(tmp_path / "two") == rows(tmp_path / "one")


def test_a_run_of_several_processes_keeps_the_seeds_of_all(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BRANCHOUT_COMMIT", "one")
    jobs = [job(folder, tmp_path, "score-fusion-branchout", seeds=(3, 1, 2))]

    def kept() -> list[str]:
        written: list[list[str]] = []
        original = finished_seeds.write

        def write(path: Path, about: Any, finished: Any, *unfinished: Any) -> None:
            original(path, about, finished, *unfinished)
            written.append(list(json.loads(path.read_text())["finished"]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(finished_seeds, "write", write)
            run_divided(jobs)
        return [" ".join(each) for each in written]

    # After each step of the first process, and after each seed.
    assert in_processes(2, kept) == [["", "3", "3 1", "3 1", "3 1 2"], []]


def test_a_seed_is_kept_before_other_processes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(value: object) -> None:
        raise ConnectionError

    measured = measuring.Measured({})
    monkeypatch.setattr(many_processes, "measure_one", lambda *given: measured)
    monkeypatch.setattr(processes, "from_main", lambda value: value)
    monkeypatch.setattr(processes, "from_each", lost)
    seeds = many_processes._measure_together(None, None, None, (1, 2), None)
    assert next(seeds) is measured
    with pytest.raises(ConnectionError):
        next(seeds)


def test_jobs_are_divided_where_there_are_enough(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    def jobs(out: str) -> list[Job]:
        return [job(folder, tmp_path / out, name, seeds=(1,)) for name in ("ncm", "logitcat-max", "logitcat-average")]

    in_processes(1, partial(measured_here, jobs("one"), together=False))
    each = in_processes(2, partial(measured_here, jobs("two"), together=True))
    assert all(each)
    assert sum(map(len, each)) == 3
    assert len(rows(tmp_path / "one")) >= 3
    assert rows(tmp_path / "two") == rows(tmp_path / "one")
