"""Measure the method on a disjoint scenario: every recipe, with joint training beside it.

    python benchmarks/method.py --data TINY_IMAGENET_DIR --base 180 --novel 20 --seeds 1 2 3 --out results

Writes one JSON per row under OUT/<dataset>/disjoint/<arch>/, and OUT/speed/extension.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.bench import results
from branchout.data import memory, scenarios
from branchout.data.batches import cache_folder, open_images
from branchout.data.benchmarks import resolve
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples, concatenate
from branchout.model.classifier import Classifier, Step
from branchout.train import frontier
from branchout.train.branch import Labelled, learn_branch
from branchout.train.features import extract
from branchout.train.fuse import fuse, fusion_data, grid_answers, problem_of
from branchout.train.loop import Event, best_device
from branchout.train.pretrain import FAST, pretrain
from branchout.train.recipes import BRANCHOUT, PAPER, REFERENCE, Recipe, StageOne

GOALS = ("all", "balanced", "avg")
DEVICE = best_device()


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def show(event: Event) -> None:
    if event.done == event.total or (event.work == "pretrain" and event.done % 10 == 0):
        print(f"  {event.work} {event.done}/{event.total} {event.figures}", flush=True)


@dataclass
class Setting:
    """One split of one dataset, and what all methods share."""

    name: str
    scenario: scenarios.Scenario
    base: Samples
    novel: Samples
    dev: Samples
    test: Samples
    preprocessing: Preprocessing
    kind: str
    arch: str
    width: int | None

    @property
    def space(self):  # type: ignore[no-untyped-def]
        return self.scenario.space

    def labels(self, samples: Samples) -> np.ndarray:
        return self.space.index(list(samples.classes))[samples.labels]

    def images(self, samples: Samples):  # type: ignore[no-untyped-def]
        return open_images(samples, self.preprocessing, DEVICE, cache=cache_folder())

    def labelled(self, samples: Samples) -> Labelled:
        return Labelled(self.images(samples), self.labels(samples))

    def columns(self, model: Classifier, samples: Samples) -> np.ndarray:
        features = extract(model, self.images(samples), device=DEVICE)[0]
        with torch.no_grad():
            return model.fused.columns(features.unbind(1)).double().cpu().numpy()


def train_whole(
    setting: Setting, samples: Samples, classes: Sequence[str], epochs: int, seed: int
) -> tuple[Classifier, float]:
    start = now()
    model = pretrain(
        setting.images(samples),
        setting.labels(samples),
        classes,
        setting.preprocessing,
        arch=setting.arch,
        width=setting.width,
        kind=setting.kind,
        optimisation=replace(FAST, epochs=epochs),
        seed=seed,
        device=DEVICE,
        report=show,
    )
    return model, now() - start


def joint_scores(setting: Setting, joint: Classifier) -> dict[str, list[frontier.Scored]]:
    """Joint training with the same dial: its new-class columns are moved by b as ours are."""
    halves = [(setting.columns(joint, half), setting.labels(half)) for half in (setting.dev, setting.test)]
    return {goal: [frontier.score_dial(halves[0], halves[1], setting.space, goal)] for goal in GOALS}


def extend_dial(
    setting: Setting, base: Classifier, stage: StageOne, kept: Samples, seed: int, views: int = 0
) -> tuple[dict[str, frontier.Scored], Step, dict[str, float]]:
    """Stage I of a recipe, then the dial."""
    start = now()
    step, _ = learn_branch(
        base,
        setting.space.branches[1],
        setting.labelled(setting.novel),
        stage,
        exemplars=setting.labelled(kept),
        where="layer4",
        seed=seed,
        views=views,
        device=DEVICE,
        report=show,
    )
    middle = now()
    model = base.extended(step)
    halves = [(setting.columns(model, half), setting.labels(half)) for half in (setting.dev, setting.test)]
    scored = {goal: frontier.score_dial(halves[0], halves[1], setting.space, goal) for goal in GOALS}
    return scored, step, {"stage1": middle - start, "rest": now() - middle}


def grid_scores(
    setting: Setting, model: Classifier, recipe: Recipe, memories: Sequence[Samples], novel_kept: Sequence[Samples]
) -> tuple[dict[str, list[frontier.Scored]], dict[str, float]]:
    """Stage II of a paper recipe, all seeds at once."""
    start = now()
    data = []
    for kept, new in zip(memories, novel_kept, strict=True):
        both = concatenate([kept, new])
        features = extract(model, setting.images(both), views=recipe.stage_two.views, seed=len(data), device=DEVICE)
        tensors = (torch.from_numpy(x).to(DEVICE) for x in (setting.labels(both), both.origin))
        data.append(fusion_data(model, features, *tensors))
    halves = [extract(model, setting.images(half), device=DEVICE)[0] for half in (setting.dev, setting.test)]
    cached = now()
    fused = fuse(problem_of(model), data, recipe.stage_two)
    trained = now()
    labels = [setting.labels(half) for half in (setting.dev, setting.test)]
    scored: dict[str, list[frontier.Scored]] = {goal: [] for goal in GOALS}
    for s in range(len(data)):
        answers = [grid_answers(model, half, fused, s).cpu().numpy() for half in halves]
        dev, test = ((a, y) for a, y in zip(answers, labels, strict=True))
        for goal in GOALS:
            scored[goal].append(frontier.score_grid(dev, test, setting.space, fused.grid, goal, recipe.balanced))
    return scored, {"cache": cached - start, "fusion": trained - cached}


def row(
    setting: Setting,
    method: str,
    recipe: str | None,
    point: str,
    rows: Sequence[frontier.Scored],
    folds: Any,
    **extra: Any,
) -> dict[str, Any]:
    means, spreads = results.averaged([r.test for r in rows])
    dial = len(rows[0].setting) == 1
    return {
        "dataset": setting.name,
        "scenario": "disjoint",
        "base_classes": len(setting.space.branches[0]),
        "novel_classes": len(setting.space.branches[1]),
        "overlap_classes": 0,
        "steps": 1,
        "arch": setting.arch,
        "method": method,
        "recipe": recipe,
        "point": point,
        "dial": dial,
        "alpha": None if dial else [r.setting[0] for r in rows],
        "beta": None if dial else [r.setting[1] for r in rows],
        "b": [r.setting[0] for r in rows] if dial else None,
        "metrics": {**means, "incremental": None, "avg_steps": None},
        "two_fold": folds,
        "two_fold_spread": results.percent(float(np.mean([r.spread for r in rows]))),
        "std": spreads,
        "per_seed": [results.figures(r.test) for r in rows],
        **extra,
        **results.provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--base", type=int, default=180)
    parser.add_argument("--novel", type=int, default=20)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--arch", default="resnet10")
    parser.add_argument("--width", type=int)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--split", type=int, default=1, help="seed of the class split and of base training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="exemplar seeds")
    parser.add_argument("--views", type=int, default=0, help="cached trunk views in stage I (0: live)")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()

    dataset = resolve(options.data)
    scenario = scenarios.build("disjoint", dataset, base=options.base, novel=options.novel, seed=options.split)
    train = scenario.train(dataset)
    grey = dataset.kind == "glyph"
    channels = 1 if grey else 3
    setting = Setting(
        name="tiny-imagenet-200" if dataset.name.startswith("tiny") else dataset.name,
        scenario=scenario,
        base=train.select(train.origin == 0),
        novel=train.select(train.origin == 1),
        dev=scenario.dev(dataset),
        test=scenario.test(dataset),
        preprocessing=Preprocessing(options.size, channels, (0.5,) * channels, (0.25,) * channels),
        kind=dataset.kind,
        arch=options.arch,
        width=options.width,
    )
    print(scenario, len(setting.base), len(setting.novel), len(setting.dev), len(setting.test), flush=True)
    start = now()
    for table in (train, setting.dev, setting.test):
        setting.images(table)
    print(f"decoded in {now() - start:.1f} s", flush=True)

    names = scenario.space.branches
    base, base_seconds = train_whole(setting, setting.base, names[0], options.epochs, options.split)
    joint, joint_seconds = train_whole(setting, train, scenario.space.classes, options.epochs, options.split)
    # The joint network's columns are those of base and step side by side, so the dial can move the new ones.
    joint.fused.space = scenario.space
    print(f"base {base_seconds:.1f} s, joint {joint_seconds:.1f} s", flush=True)

    # What the base model alone can do, on the base classes of both halves.
    known = concatenate([half.of_classes(names[0]) for half in (setting.dev, setting.test)])
    base_only = float((setting.columns(base, known).argmax(1) == setting.labels(known)).mean())
    memories = [memory.keep(setting.base, per_class=10, seed=s) for s in options.seeds]
    novel_kept = [memory.keep(setting.novel, per_class=10, seed=s) for s in options.seeds]
    common = {"seeds": options.seeds, "settings": vars(options), "peak_memory_bytes": 0}
    folder = options.out / setting.name / "disjoint" / setting.arch
    table: list[tuple[str, dict[str, Any], float]] = []

    def record(
        method: str,
        recipe: Recipe | None,
        scored: dict[str, list[frontier.Scored]],
        seconds: dict[str, float],
        **more: Any,
    ) -> None:
        folds = results.two_fold(scored)
        for goal, rows in scored.items():
            name = "-".join([method, *([recipe.name] if recipe else []), goal])
            if torch.cuda.is_available():
                common["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            content = row(
                setting, method, recipe.name if recipe else None, goal, rows, folds, seconds=seconds, **common, **more
            )
            results.write(folder, f"{name}-split{options.split}", content)
        table.append((f"{method} {recipe.name if recipe else ''}", folds, sum(seconds.values())))
        print(table[-1], flush=True)

    parameters = {"base": sum(base.parameter_counts()[k] for k in ("base",))}
    record("joint", None, joint_scores(setting, joint), {"train": joint_seconds}, parameters=parameters["base"])

    # The paper's stage I sees no exemplars: one branch serves all exemplar seeds.
    start = now()
    step, _ = learn_branch(
        base, names[1], setting.labelled(setting.novel), PAPER.stage_one, where="layer4", seed=options.split,
        views=options.views, device=DEVICE, report=show,
    )  # fmt: skip
    stage_one = now() - start
    model = base.extended(step)
    new_half = concatenate([half.of_classes(names[1]) for half in (setting.dev, setting.test)])
    own = setting.columns(model, new_half)[:, scenario.space.slice_of(1)]
    local = setting.space.class_of_column[scenario.space.slice_of(1)]
    novel_only = float((local[own.argmax(1)] == setting.labels(new_half)).mean())
    print(f"base model {base_only:.4f}, novel alone {novel_only:.4f}", flush=True)
    extra = {"base_model": results.percent(base_only), "novel_alone": results.percent(novel_only)}
    extra["parameters"] = sum(v for k, v in model.parameter_counts().items() if k not in ("heads", "deltas"))
    for recipe in (REFERENCE, PAPER):
        scored, seconds = grid_scores(setting, model, recipe, memories, novel_kept)
        record("score-fusion", recipe, scored, {"stage1": stage_one, **seconds}, **extra)
    halves = [(setting.columns(model, half), setting.labels(half)) for half in (setting.dev, setting.test)]
    alone = {goal: [frontier.score_dial(halves[0], halves[1], setting.space, goal)] for goal in GOALS}
    record("paper-stage-one-dial", None, alone, {"stage1": stage_one}, **extra)

    scored_by_goal: dict[str, list[frontier.Scored]] = {goal: [] for goal in GOALS}
    seconds_of: list[dict[str, float]] = []
    for seed, kept in zip(options.seeds, memories, strict=True):
        scored, _, seconds = extend_dial(setting, base, BRANCHOUT.stage_one, kept, seed, options.views)
        seconds_of.append(seconds)
        for goal in GOALS:
            scored_by_goal[goal].append(scored[goal])
    seconds = {key: float(np.median([s[key] for s in seconds_of])) for key in seconds_of[0]}
    record("score-fusion", BRANCHOUT, scored_by_goal, seconds, **extra)

    whole = sum(seconds.values())
    speed = {
        "of": "whole extension (stage I, features, dial)",
        "against": "joint training from scratch",
        "ratio": whole / joint_seconds,
        "of_seconds": whole,
        "against_seconds": joint_seconds,
        **results.provenance(),
    }
    results.write(options.out / "speed", f"extension-split{options.split}", speed)
    for name, folds, taken in table:
        print(f"{name:32} " + " ".join(f"{folds[g]:6.2f}" for g in GOALS) + f"   {taken:7.1f} s")
    print(f"extension / joint = {whole / joint_seconds:.3f}")


if __name__ == "__main__":
    main()
