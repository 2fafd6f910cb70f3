"""Several processes measure what one measures, each a part of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_processes import in_processes
from test_runner import PLAN, folder, job  # noqa: F401 – a fixture

from branchout.bench import measure as measuring
from branchout.bench.many_processes import run_divided
from branchout.bench.runner import Job, run_all


def rows(out: Path) -> dict[str, Any]:
    """What was measured, without times and places."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.rglob("*.json")) if "-" in path.stem}
    return {
        name: {key: row[key] for key in ("metrics", "per_seed", "seeds", "std", "two_fold", "parameters")}
        for name, row in found.items()
    }


def measured_here(jobs: list[Job], together: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Run the jobs, and return which method this process has measured with which seeds."""
    found: list[tuple[str, tuple[int, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_dial", "_baseline"):
            original = getattr(measuring, name)

            def noted(method: Any, *others: Any, original: Any = original, name: str = name) -> Any:
                found.append((name, tuple(others[2])))
                return original(method, *others)

            patch.setattr(measuring, name, noted)
        (run_divided if together else run_all)(jobs)
    return found


def test_seeds_of_one_job_are_divided(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    def jobs(out: str) -> list[Job]:
        return [job(folder, tmp_path / out, "score-fusion-branchout", seeds=(2, 1))]

    (alone,) = in_processes(1, partial(measured_here, jobs("one"), together=False))
    first, second = in_processes(2, partial(measured_here, jobs("two"), together=True))
    assert alone == [("_dial", (2, 1))]
    assert first == [("_dial", (2,))]
    assert second == [("_dial", (1,))]
    assert rows(tmp_path / "one")
    assert rows(tmp_path / "two") == rows(tmp_path / "one")


def test_jobs_are_divided_where_there_are_enough(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    def jobs(out: str) -> list[Job]:
        return [job(folder, tmp_path / out, name, seeds=(1,)) for name in ("ncm", "logitcat-max", "logitcat-average")]

    in_processes(1, partial(measured_here, jobs("one"), together=False))
    each = in_processes(2, partial(measured_here, jobs("two"), together=True))
    assert all(each)
    assert sum(map(len, each)) == 3
    assert len(rows(tmp_path / "one")) >= 3
    assert rows(tmp_path / "two") == rows(tmp_path / "one")
