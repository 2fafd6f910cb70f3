"""Measure the ladder and the candidates over many steps, one row each; a row that exists is not measured again.

    python -m benchmarks.steps --data DIR/tiny-imagenet-200 --arch resnet10 --one-branch-epochs 10
    python -m benchmarks.steps --data DIR/tiny-imagenet-200 --split 2 --rungs compact joint-head corrections mixed flip
    python -m benchmarks.steps --data DIR/tiny-imagenet-200 --base-classes 180 --novel-classes 20 --steps 1
    python -m benchmarks.steps --data glyphs --base-classes 40 --novel-classes 8 --steps 10 --width 8 --base-epochs 20

With `--data` and nothing else it is the ladder in Table 2's experiment of the dataset; `--rungs` names candidates too.
With `--no-corrections` no branch corrects earlier logits, in any of the rungs. Rows go to
results/steps/DATASET-ARCH[-one-step][-splitN]/RUNG[-no-corrections].json, and the tables of docs/research.md are
written from all rows there are; `--table` does only that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import table
from benchmarks.steps.ladder import LADDER, NO_CORRECTIONS, RUNGS, Run, Scores, label_of
from branchout.bench import rows, tables
from branchout.bench.experiment import Experiment
from branchout.bench.plan import Plan
from branchout.data.datasets import Dataset, resolve
from branchout.errors import BranchoutError
from branchout.goals import PAPER_GOALS
from branchout.training.loop import Event
from branchout.training.optimisation import settings_dict


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder, such as tiny-imagenet-200, or 'glyphs'")
    parser.add_argument("--arch", default="resnet10")
    for name in (
        "base-classes",
        "novel-classes",
        "steps",
        "width",
        "base-epochs",
        "epochs",
        "one-branch-epochs",
        "exemplars",
        "split",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="exemplar and stage-I seeds")
    parser.add_argument("--rungs", nargs="+", choices=list(RUNGS), default=list(LADDER))
    parser.add_argument("--no-corrections", action="store_true", help="no branch corrects earlier logits")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--page", type=Path, default=table.PAGE)
    parser.add_argument("--table", action="store_true", help="write the tables of the page from the rows, and end")
    asked = parser.parse_args(words)
    table.around(asked.page)  # before hours of measuring
    if not asked.table:
        if asked.data is None:
            parser.error("--data is required")
        measure(asked)
    table.write(asked.page, asked.out)


def plan_of(asked: argparse.Namespace, dataset: Dataset) -> Plan:
    """Table 2's plan for this dataset and network, with what was asked for instead."""
    changes = {"width": asked.width, "exemplars": asked.exemplars, "split": asked.split}
    plan = tables.plan_for("multistep", dataset, arch=asked.arch, **changes)
    sizes = {"base": asked.base_classes, "novel": asked.novel_classes, "steps": asked.steps}
    plan = replace(plan, epochs=asked.epochs, **{name: value for name, value in sizes.items() if value is not None})
    base = asked.base_epochs or (tables.glyph_epochs(plan.base) if dataset.kind == "glyph" else None)
    return plan if base is None else replace(plan, pretraining=replace(plan.pretraining, epochs=base))


def measure(asked: argparse.Namespace) -> None:
    dataset = resolve(asked.data)
    plan = plan_of(asked, dataset)
    one_step = "-one-step" if plan.steps == 1 else ""
    split = "" if plan.split == 1 else f"-split{plan.split}"
    folder = asked.out / "steps" / f"{dataset.name}-{plan.arch}{one_step}{split}"
    names = [name for name in asked.rungs if not (RUNGS[name].photos_only and dataset.kind == "glyph")]
    if asked.no_corrections:
        names = [name for name in names if RUNGS[name].corrects]
        if not names:
            raise BranchoutError(f"--no-corrections changes none of these rungs: {', '.join(asked.rungs)}")
    suffix = NO_CORRECTIONS if asked.no_corrections else ""
    missing = [name for name in names if not exists(folder / f"{name}{suffix}.json", plan, asked.seeds)]
    if not missing:
        print(f"all {len(names)} rows exist in {folder}")
        return
    made_by = rows.provenance() | {"command": " ".join(["python -m benchmarks.steps", *_words(asked)])}
    experiment = Experiment(plan, dataset, on_progress=Lines())
    begun = experiment.now()
    print(f"base: {rows.percent(experiment.before.test.all)} after {experiment.now() - begun:.0f} s", flush=True)
    runs = [
        Run(experiment, seed, asked.one_branch_epochs, corrections=not asked.no_corrections) for seed in asked.seeds
    ]
    for name in missing:
        start = experiment.now()
        scores = [RUNGS[name].measure(run) for run in runs]
        found = row(name + suffix, experiment, scores, asked.seeds, experiment.now() - start)
        rows.write(folder, name + suffix, {**found, **made_by})
        shown = " / ".join(rows.number(found["two_fold"][goal]) for goal in PAPER_GOALS)
        print(f"{name}{suffix}: {shown} ({found['seconds']['total']:.0f} s)", flush=True)


def exists(path: Path, plan: Plan, seeds: list[int]) -> bool:
    """Whether a row of the same plan and seeds is there; one of another plan is an error."""
    if not path.exists():
        return False
    found = rows.read_row(path)
    if found["settings"] != settings_dict(plan) | {"model": None} or found["seeds"] != seeds:
        raise BranchoutError(f"{path} was measured with other settings or seeds. Delete it, or choose another --out.")
    return True


def row(name: str, experiment: Experiment, scores: list[Scores], seeds: list[int], seconds: float) -> dict[str, Any]:
    means, spreads = rows.averaged([each["balanced"].test for each in scores])
    folds = {goal: [each[goal].two_fold for each in scores] for goal in PAPER_GOALS}
    space = experiment.scenario.space
    return {
        "dataset": experiment.dataset.name,
        "rung": name,
        "label": label_of(name),
        "scenario": experiment.plan.scenario,
        "base_classes": len(space.branches[0]),
        "novel_classes": sum(len(names) for names in space.branches[1:]),
        "steps": experiment.steps,
        "arch": experiment.plan.arch,
        "point": "balanced",
        "metrics": means,
        "std": spreads,
        "two_fold": {goal: rows.percent(sum(values) / len(values)) for goal, values in folds.items()},
        "two_fold_per_seed": [
            {goal: rows.percent(found[n]) for goal, found in folds.items()} for n in range(len(seeds))
        ],
        "per_seed": [rows.figures(each["balanced"].test) for each in scores],
        "seeds": seeds,
        "base_model": rows.percent(experiment.before.test.all),
        "base_weights": experiment.base_weights,
        "seconds": {"total": round(seconds, 1)},
        "settings": settings_dict(experiment.plan) | {"model": None},
    }


class Lines:
    """Progress as a line every half minute."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, event: Event) -> None:
        if time.monotonic() - self.last > 30:
            self.last = time.monotonic()
            print(f"  {event.work} {event.done}/{event.total}", flush=True)


def _words(asked: argparse.Namespace) -> list[str]:
    """The options that were given, with the data by its name alone."""
    given: Mapping[str, Any] = {k: v for k, v in vars(asked).items() if v is not None and k not in ("table", "page")}
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words += [f"--{name.replace('_', '-')}"] if value else []
            continue
        value = Path(value).name if name == "data" else value
        words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
