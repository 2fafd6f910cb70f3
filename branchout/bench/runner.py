"""Run jobs: measure the rows that are missing, each once, however many processes share a results folder.

A job measures all rows of one method in one experiment; a row is one file. A job takes a lock, which is released when
its process dies, and then looks again whether its rows exist. So two processes never run the same job, and a killed
one leaves no incomplete row. The exemplar seeds that it has finished are in a file of their own and are used again.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.bench import finished_seeds
from branchout.bench import rows as results
from branchout.bench.experiment import Experiment
from branchout.bench.measure import Measured, OnStep, has_own_base, measure, uses_seeds
from branchout.bench.methods import RENAMED, Method, method_named
from branchout.bench.plan import Plan, difference, flat
from branchout.data.datasets import resolve
from branchout.data.samples import digest
from branchout.errors import BranchoutError, DoesNotApply
from branchout.evaluate.two_fold import Scored
from branchout.files import lock
from branchout.goals import PAPER_GOALS
from branchout.metrics import average_over_steps, incremental, part_of_class
from branchout.training.loop import Event, OnProgress, silent
from branchout.training.optimisation import settings_dict

_log = logging.getLogger(__name__)
Opened = dict[tuple[str, Plan], Experiment]
"""The last experiment, with what its jobs have trained, by its data and plan."""
MeasureSeeds = Callable[[Method, Experiment, Sequence[int], OnStep], Iterator[Measured]]
"""Measures a method with each of several seeds, in their order."""
_OPENED: Opened = {}
"""That of a worker, for its next group of jobs."""
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
        found = {point: self.folder / f"{self.method}-{point}.json" for point in points}
        for old in (old for old, name in RENAMED.items() if name == self.method):
            older = {point: self.folder / f"{old}-{point}.json" for point in points}
            found = {point: older[point] if older[point].exists() else path for point, path in found.items()}
        return found

    @property
    def partial(self) -> Path:
        """Where finished seeds are kept until the rows are complete."""
        return self.folder / f"{self.method}.partial"

    def missing(self) -> list[str]:
        """The operating points without a row, or with one that is marked as outdated.

        A row measured with other settings is an error, and so is another method's row of another plan beside it.
        """
        files = self.files()
        rows = {point: self._checked(path, own=True) for point, path in files.items()}
        absent = [point for point, row in rows.items() if row is None or row.get("outdated") or self._fewer(row)]
        for path in sorted(set(self.folder.glob("*.json")) - set(files.values())) if absent else ():
            self._checked(path, own=False)
        return absent

    def _fewer(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has only the first of the seeds that are asked for: it is measured again with all."""
        asked = tuple(_asked(row))
        return asked != self.seeds and asked == self.seeds[: len(asked)]

    def _more(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has further seeds than are asked for: it stays, unless it would have to be measured again."""
        return tuple(_asked(row)[: len(self.seeds)]) == self.seeds and not row.get("outdated")

    def _checked(self, path: Path, *, own: bool) -> dict[str, Any] | None:
        """A row, checked for being of this plan, and with `own` of these seeds and recipe; None if it was deleted."""
        try:
            row = results.read_row(path)
        except BranchoutError:
            if path.exists():
                raise
            return None
        wanted = asdict(self.plan)
        del wanted["model"]  # its weights are compared, not its path
        if own:
            wanted |= {} if self._fewer(row) or self._more(row) else {"seeds": self.seeds}
            # An outdated row is measured again, with today's recipe.
            wanted |= {} if row.get("outdated") else method_named(self.method).settings()
        # Older rows do not name every setting: those had their defaults. An optimiser is named only if it is not SGD.
        recorded = flat(asdict(Plan("", None, 0))) | flat(row["settings"])
        recorded["seeds"] = _asked(row)
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


def _asked(row: Mapping[str, Any]) -> list[int]:
    return list(row.get("asked_seeds", row["seeds"]))


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
    """All that a measured seed depends on, but the seed. It trains the base model if there is none yet."""
    train = experiment.train
    return {
        "method": job.method,
        "settings": _settings(job, method),
        "images": digest(job.images, "\n".join(train.ids), train.origin.tobytes()),
        "base_weights": None if has_own_base(method, job.plan) else experiment.base_weights,
        **{name: made_by[name] for name in ("versions", "hardware", "commit")},
    }


def _settings(job: Job, method: Method) -> dict[str, Any]:
    plan = job.plan
    return {**settings_dict(plan), "model": Path(plan.model).name if plan.model else None, **method.settings()}


def row(job: Job, method: Method, experiment: Experiment, measured: Sequence[Measured], point: str) -> dict[str, Any]:
    """The row of one operating point of one method, from what was measured with each seed."""
    plan, space, first = job.plan, experiment.scenario.space, measured[0]
    per_seed = [each.points[point] for each in measured]
    last = [steps[-1] for steps in per_seed]
    means, spreads = results.averaged([scored.test for scored in last])
    before = [each.first or experiment.before for each in measured]
    steps_of = [[base.test, *(scored.test for scored in steps)] for base, steps in zip(before, per_seed, strict=True)]
    over_steps = {
        "incremental": results.percent(float(np.mean([incremental(steps) for steps in steps_of]))),
        "avg_steps": results.percent(float(np.mean([average_over_steps(steps) for steps in steps_of]))),
    }
    every_step = 1 < experiment.steps == len(per_seed[0])
    both = _on_both_halves(before, per_seed, every_step) if point == "plain" else None
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
        "two_fold": _two_fold(measured, point) or None,
        "two_fold_spread": results.percent(float(np.mean([scored.spread for scored in last]))),
        "std": spreads,
        "seeds": list(job.seeds)[: len(per_seed)],
        "asked_seeds": list(job.seeds),
        "images": job.images or None,
        "per_seed": [results.figures(scored.test) for scored in last],
        "per_step": [[results.figures(scored.test) for scored in steps] for steps in per_seed] if every_step else None,
        "per_step_both": [[results.figures(each.both) for each in steps] for steps in per_seed] if every_step else None,
        "correct": _correct(experiment, last) if point != "alone" else None,
        "stage1_per_seed": method.stage_one_per_seed or None,
        "base_model": results.percent(float(np.mean([base.test.all for base in before]))),
        "base_weights": None if first.first else experiment.base_weights,
        "test_images": len(experiment.halves(experiment.steps)[1]),
        **{name: results.percent(value) for name, value in first.extra.items()},
        "curve": first.curve or None if point != "plain" else None,
        "parameters": first.parameters,
        "base_parameters": first.base_parameters or sum(each.numel() for each in experiment.base.backbone.parameters()),
        "seconds": {part: float(np.median([each.seconds[part] for each in measured])) for part in first.seconds},
        "peak_memory_bytes": max((each.peak_memory for each in measured if each.peak_memory), default=None),
        "gpu_shared": any(each.gpu_shared for each in measured),
        "settings": _settings(job, method),
    }


def _two_fold(measured: Sequence[Measured], point: str) -> dict[str, float | None]:
    """The two-fold score of each of the paper's goals, at the points that are chosen as this one is."""
    prefix = "dial-" if point.startswith("dial-") else ""
    return {
        goal: results.percent(float(np.mean([each.points[prefix + goal][-1].two_fold for each in measured])))
        for goal in PAPER_GOALS
        if prefix + goal in measured[0].points
    }


def _operating_point(scored: Sequence[Scored]) -> dict[str, Any]:
    """The chosen settings, one for each seed: (α, β) of a grid, or b of the dial with the offsets of the steps."""
    chosen = [each.setting for each in scored]
    return {
        "dial": len(chosen[0]) == 1,
        "alpha": [each[0] for each in chosen] if len(chosen[0]) == 2 else None,
        "beta": [each[1] for each in chosen] if len(chosen[0]) == 2 else None,
        "b": [each[0] for each in chosen] if len(chosen[0]) == 1 else None,
        "shifts": [list(each.offsets) for each in scored] if scored[0].offsets else None,
    }


def _correct(experiment: Experiment, last: Sequence[Scored]) -> dict[str, list[str]]:
    """Which validation images of each part each seed predicts correctly after the last step, for paired comparisons."""
    space, (dev, test) = experiment.space(experiment.steps), experiment.halves(experiment.steps)
    labels = np.concatenate([experiment.labels(half, experiment.steps) for half in (test, dev)])
    part = part_of_class(space)[labels]
    names = ["base", *(f"step {n}" for n in range(1, len(space.branches))), "overlap"]
    return {names[n]: [results.packed(scored.right[part == n]) for scored in last] for n in np.unique(part).tolist()}


def _on_both_halves(
    before: Sequence[Scored], per_seed: Sequence[Sequence[Scored]], every_step: bool
) -> dict[str, float | None]:
    """Accuracies on all validation images, which are the test images of the literature."""
    means, _ = results.averaged([steps[-1].both for steps in per_seed])
    over_steps = [
        incremental([base.both, *(scored.both for scored in steps)])
        for base, steps in zip(before, per_seed, strict=True)
    ]
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
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Of the GPU during this job; without a GPU of the process, which earlier jobs may have made larger."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_of_process()


def peak_of_process() -> int | None:
    try:
        told = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(told[1]) * 1024 if told else None
    except OSError:
        return None
