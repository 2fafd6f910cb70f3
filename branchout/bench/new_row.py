"""Rows from what was measured: means and spreads over seeds, accuracies by step, settings and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchout.bench import rows as results
from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.measure import Measured, starts_from_base
from branchout.bench.methods import Method
from branchout.evaluate.compare import part_names
from branchout.evaluate.two_fold import Scored
from branchout.goals import PAPER_GOALS
from branchout.metrics import average_over_steps, incremental, part_of_class
from branchout.training.optimisation import settings_dict


def row(job: Job, method: Method, experiment: Experiment, measured: Sequence[Measured], point: str) -> dict[str, Any]:
    """The row of one operating point of one method, from what was measured with each seed."""
    plan, space, first = job.plan, experiment.scenario.space, measured[0]
    per_seed = [each.points[point] for each in measured]
    last = [steps[-1] for steps in per_seed]
    means, spreads = results.averaged([scored.test for scored in last])
    before = _bases(experiment, measured, shared=starts_from_base(method, plan))
    every_step = 1 < experiment.steps == len(per_seed[0])
    over_steps: dict[str, float | None] = dict.fromkeys(("incremental", "avg_steps"))
    if every_step:
        steps_of = [
            [base.test, *(scored.test for scored in steps)] for base, steps in zip(before, per_seed, strict=True)
        ]
        over_steps["incremental"] = results.percent(float(np.mean([incremental(steps) for steps in steps_of])))
        over_steps["avg_steps"] = results.percent(float(np.mean([average_over_steps(steps) for steps in steps_of])))
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
        "metrics": {**means, **over_steps},
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
        "views": first.views,
        "stage1_per_seed": method.stage_one_per_seed or None,
        "base_model": results.percent(float(np.mean([base.test.all for base in before]))) if before else None,
        "base_weights": experiment.base_weights if starts_from_base(method, plan) else None,
        "test_images": len(experiment.halves(experiment.steps)[1]),
        **{name: results.percent(value) for name, value in first.extra.items()},
        "curve": first.curve or None if point != "plain" else None,
        "parameters": first.parameters,
        "base_parameters": first.base_parameters or sum(each.numel() for each in experiment.base.backbone.parameters()),
        "seconds": {part: float(np.median([each.seconds[part] for each in measured])) for part in first.seconds},
        "peak_memory_bytes": max((each.peak_memory for each in measured if each.peak_memory), default=None),
        "gpu_shared": any(each.gpu_shared for each in measured),
        "settings": row_settings(job, method),
    }


def _bases(experiment: Experiment, measured: Sequence[Measured], *, shared: bool) -> list[Scored]:
    """The base of each seed: its own, the `shared` one, or none."""
    own = [each.first for each in measured if each.first]
    return [experiment.before] * len(measured) if shared else own


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
    names = part_names(space)
    return {names[n]: [results.packed(scored.right[part == n]) for scored in last] for n in np.unique(part).tolist()}


def _on_both_halves(
    before: Sequence[Scored], per_seed: Sequence[Sequence[Scored]], every_step: bool
) -> dict[str, float | None]:
    """Accuracies on all validation images, which are the test images of the literature."""
    means, _ = results.averaged([steps[-1].both for steps in per_seed])
    found = {name: means[name] for name in ("all", "base", "novel", "avg")}
    if not every_step:
        return {**found, "incremental": None}
    over_steps = [
        incremental([base.both, *(scored.both for scored in steps)])
        for base, steps in zip(before, per_seed, strict=True)
    ]
    return {**found, "incremental": results.percent(float(np.mean(over_steps)))}


def row_settings(job: Job, method: Method) -> dict[str, Any]:
    """What a row was measured with: the plan, and the method's own settings."""
    plan = job.plan
    return {**settings_dict(plan), "model": Path(plan.model).name if plan.model else None, **method.settings()}
