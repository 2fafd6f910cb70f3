"""Run jobs: measure the rows that are missing, each once, however many processes share a results folder.

A job measures all rows of one method in one experiment; a row is one file. A job takes a lock, which is released when
its process dies, and then looks again whether its rows exist. So two processes never run the same job, and a killed
one leaves no incomplete row.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.bench import rows as results
from branchout.bench.experiment import Experiment
from branchout.bench.measure import measure
from branchout.bench.measured import Measured
from branchout.bench.methods import Method, method_named
from branchout.bench.plan import Plan, difference, flat
from branchout.data.datasets import resolve
from branchout.errors import BranchoutError, DoesNotApply
from branchout.files import lock
from branchout.method.two_fold import Scored
from branchout.metrics import PAPER_GOALS, average_over_steps, incremental
from branchout.training.loop import Report, silent
from branchout.training.optimisation import settings_dict

_ALONE = threading.Lock()
"""Jobs of one process run one at a time: they share torch's random number generator."""


@dataclass(frozen=True)
class Job:
    """One method in one experiment."""

    data: str
    dataset: str
    """The dataset's name in results."""
    table: str
    plan: Plan
    method: str
    seeds: tuple[int, ...]
    out: Path
    command: str = ""
    """The command that was typed."""
    images: str = ""
    """Identifies the dataset's images by their names and classes."""

    @property
    def folder(self) -> Path:
        table = self.table if self.plan.split == 1 else f"{self.table}-split{self.plan.split}"
        return self.out / self.dataset / table / self.plan.arch

    @property
    def scenario_file(self) -> Path:
        """Where a clustered scenario is kept."""
        return self.folder.parent / "scenario.json"

    def files(self) -> dict[str, Path]:
        """The file of each operating point."""
        points = method_named(self.method).points()
        return {point: self.folder / f"{self.method}-{point}.json" for point in points}

    def missing(self) -> list[str]:
        """The operating points without a row, or with one that is marked as outdated.

        A row that was measured with other settings is an error. So is another method's row of another plan in the same
        folder.
        """
        files = self.files()
        rows = {point: self._checked(path, own=True) for point, path in files.items()}
        absent = [point for point, row in rows.items() if row is None or row.get("outdated")]
        for path in sorted(set(self.folder.glob("*.json")) - set(files.values())) if absent else ():
            self._checked(path, own=False)
        return absent

    def _checked(self, path: Path, *, own: bool) -> dict[str, Any] | None:
        """A row, checked for being of this plan, and with `own` of the same seeds and recipe; None if there is none
        (another process may be deleting rows)."""
        try:
            row = results.read_row(path)
        except BranchoutError:
            if path.exists():
                raise
            return None
        wanted = asdict(self.plan)
        del wanted["model"]  # its weights are compared, not its path
        if own:
            wanted["seeds"] = self.seeds
            if not row.get("outdated"):  # an outdated row is measured again, with today's recipe
                wanted |= method_named(self.method).settings()
        # Older rows do not name every setting: those had their defaults. An optimiser is named only if it is not SGD.
        recorded = flat(asdict(Plan("", None, 0))) | flat(row["settings"])
        recorded["seeds"] = row.get("asked_seeds", row["seeds"])
        differing = difference(recorded, wanted)
        if differing:
            raise BranchoutError(
                f"{path} was measured with {differing} is asked for now; delete it, or write elsewhere with --out"
            )
        if (row.get("images") or self.images) != self.images:
            raise BranchoutError(
                f"{path} was measured with other images of '{self.dataset}' than there are now; "
                "delete it, or write elsewhere with --out"
            )
        return row


@dataclass(frozen=True)
class Done:
    """How a job ended: the files it wrote, or why it wrote none."""

    job: Job
    written: tuple[Path, ...] = ()
    why_not: str = ""


def run_all(
    jobs: Sequence[Job],
    *,
    executor: Executor | None = None,
    workers: int = 1,
    report: Report = silent,
    on_done: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Run every job with missing rows: in this process, or on the `workers` of an executor.

    Rows that were measured with other settings are found before anything is trained.
    """
    missing = [job for job in jobs if job.missing()]
    if executor is None:
        opened: dict[tuple[str, Plan], Experiment] = {}
        finished: list[Done] = []
        # First the jobs that no other process runs, then the others: they are finished by now, or were stopped.
        for wait in (False, True):
            ended = {done.job for done in finished}
            for job in jobs:
                done = None if job in ended else run(job, opened, report, wait=wait)
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
        return [done for done in (run(job) for job in jobs) if done is not None]


def run(
    job: Job, opened: dict[tuple[str, Plan], Experiment] | None = None, report: Report = silent, *, wait: bool = True
) -> Done | None:
    """Measure the missing rows of one job; without `wait`, None if another process is measuring them.

    `opened` keeps experiments between jobs.
    """
    if not job.missing():
        return Done(job)
    with lock(job.folder / f".{job.method}.lock", wait=wait) as mine:
        if not mine:
            return None
        missing = job.missing()  # another process may have written them meanwhile
        if not missing:
            return Done(job)
        if opened is None:
            experiment = _experiment(job.data, job.plan, job.scenario_file)
        else:
            if (job.data, job.plan) not in opened:
                opened.clear()  # images and models of one experiment at a time
                opened[job.data, job.plan] = Experiment(
                    job.plan, resolve(job.data), scenario_file=job.scenario_file, report=report
                )
            experiment = opened[job.data, job.plan]
        method = method_named(job.method)
        forget_peak_memory()
        shared = others_beside()
        # Before the measurement: the code may be edited while it runs for hours.
        made_by = {**results.provenance(), "command": job.command or results.command()}
        try:
            measured = measure(method, experiment, job.seeds)
        except DoesNotApply as error:
            return Done(job, why_not=str(error))
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # other processes may need it
        shared = shared or others_beside()
        made = {
            path: {**row(job, method, experiment, measured, point), "gpu_shared": shared, **made_by}
            for point, path in job.files().items()
            if point in missing
        }
        return Done(job, tuple(results.write_together(made)))


@lru_cache(maxsize=1)
def _experiment(data: str, plan: Plan, scenario_file: Path) -> Experiment:
    """The last experiment of a worker, with what its earlier jobs have trained."""
    return Experiment(plan, resolve(data), scenario_file=scenario_file)


def row(job: Job, method: Method, experiment: Experiment, measured: Measured, point: str) -> dict[str, Any]:
    """The row of one operating point of one method."""
    plan, space = job.plan, experiment.scenario.space
    per_seed = measured.points[point]
    last = [steps[-1] for steps in per_seed]
    means, spreads = results.averaged([scored.test for scored in last])
    prefix = "dial-" if point.startswith("dial-") else ""
    folds = {
        goal: results.percent(float(np.mean([steps[-1].two_fold for steps in measured.points[prefix + goal]])))
        for goal in PAPER_GOALS
        if prefix + goal in measured.points
    }
    before = experiment.before()
    steps_of = [[before, *(scored.test for scored in steps)] for steps in per_seed]
    over_steps = {
        "incremental": results.percent(float(np.mean([incremental(steps) for steps in steps_of]))),
        "avg_steps": results.percent(float(np.mean([average_over_steps(steps) for steps in steps_of]))),
    }
    every_step = 1 < experiment.steps == len(per_seed[0])
    both = _on_both_halves(experiment, measured, every_step) if point == "plain" else None
    return {
        "dataset": job.dataset,
        "table": job.table,
        "scenario": plan.scenario,
        "base_classes": len(space.branches[0]),
        "novel_classes": sum(len(names) for names in space.branches[1:]),
        "overlap_classes": len(space.overlap),
        "steps": experiment.steps,
        "arch": plan.arch,
        "method": method.result_name,
        "label": method.label,
        "recipe": method.recipe,
        "point": point,
        **_operating_point(last),
        "metrics": {**means, **(over_steps if every_step else dict.fromkeys(over_steps))},
        "both_halves": both,
        "two_fold": folds or None,
        "two_fold_spread": results.percent(float(np.mean([scored.spread for scored in last]))),
        "std": spreads,
        "seeds": list(job.seeds)[: len(per_seed)],
        "asked_seeds": list(job.seeds),
        "images": job.images or None,
        "per_seed": [results.figures(scored.test) for scored in last],
        "per_step": [[results.figures(scored.test) for scored in steps] for steps in per_seed] if every_step else None,
        "base_model": results.percent(before.all),
        "base_weights": experiment.base_weights,
        "test_images": len(experiment.halves(experiment.steps)[1]),
        **{name: results.percent(value) for name, value in measured.extra.items()},
        "curve": measured.curve or None if point != "plain" else None,
        "parameters": measured.parameters,
        "base_parameters": sum(each.numel() for each in experiment.base.backbone.parameters()),
        "seconds": {**measured.seconds},
        "peak_memory_bytes": peak_memory(),
        "settings": {
            **settings_dict(plan),
            "model": Path(plan.model).name if plan.model else None,
            **method.settings(),
        },
    }


def _operating_point(scored: Sequence[Scored]) -> dict[str, Any]:
    """The chosen settings, one for each seed: (α, β) of a grid, or b of the dial with the offsets of the steps."""
    chosen = [each.setting for each in scored]
    return {
        "dial": len(chosen[0]) == 1,
        "alpha": [each[0] for each in chosen] if len(chosen[0]) == 2 else None,
        "beta": [each[1] for each in chosen] if len(chosen[0]) == 2 else None,
        "b": [each[0] for each in chosen] if len(chosen[0]) == 1 else None,
        "shifts": [list(each.shifts) for each in scored] if scored[0].shifts else None,
    }


def _on_both_halves(experiment: Experiment, measured: Measured, every_step: bool) -> dict[str, float | None]:
    """Accuracies on all validation images, which are the test images of the literature."""
    means, _ = results.averaged([steps[-1] for steps in measured.both])
    over_steps = [incremental([experiment.before_on_both(), *steps]) for steps in measured.both]
    return {
        **{name: means[name] for name in ("all", "base", "novel", "avg")},
        "incremental": results.percent(float(np.mean(over_steps))) if every_step else None,
    }


def others_beside() -> bool:
    """Whether other processes use this GPU, so that times are too long. Our own context takes less than 1 GiB."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > 1 << 30


def forget_peak_memory() -> None:
    """Count peaks from here on, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # only Linux has it
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Of the GPU during this job; without a GPU of the process, which earlier jobs may have made larger."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        told = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(told[1]) * 1024 if told else None
    except OSError:
        return None
