"""Measure a method in an experiment: train it step by step, choose operating points on dev, measure them on test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from branchout.bench.experiment import Experiment
from branchout.bench.measure_baseline import measure_baseline
from branchout.bench.measured import Measured, curve
from branchout.bench.methods import Method
from branchout.data.samples import Samples, concatenate
from branchout.method.config import ExtendConfig
from branchout.method.dial import dial_frontier
from branchout.method.extend import Extension
from branchout.method.features import logit_columns
from branchout.method.frontier import grid_frontier
from branchout.method.recipes import PAPER, Recipe, recipe_named
from branchout.method.score_fusion import FusionData, fusion_data, problem_of
from branchout.method.split import DataSplit
from branchout.method.stage2 import fuse, grid_answers
from branchout.method.two_fold import Scored, score_dial, score_grid
from branchout.metrics import PAPER_GOALS, accuracies
from branchout.model.classifier import Classifier

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def measure(method: Method, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    """Run a method through all steps of an experiment."""
    assert experiment.base is not None  # trained before any clock starts
    if method.baseline is not None:
        return measure_baseline(method.baseline, method.points(), experiment, seeds)
    assert method.recipe is not None
    recipe = recipe_named(method.recipe)
    if method.name == "stage-one-dial":
        return _stage_one_dial(experiment)
    if method.points() == ("alone",):
        return _alone(method.branch, experiment)
    return (_dial if recipe.dial else _grid)(method, recipe, experiment, seeds)


def _dial(method: Method, recipe: Recipe, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    """The recipe with the dial, by the same code as `branchout extend`."""
    measured = Measured({goal: [] for goal in PAPER_GOALS})
    seconds: list[dict[str, float]] = []
    for seed in seeds:
        model = experiment.base.rebuilt((), method.pooler)
        scored: dict[str, list[Scored]] = {goal: [] for goal in PAPER_GOALS}
        took = {"stage1": 0.0, "fusion": 0.0, "choice": 0.0}
        for step in range(1, experiment.steps + 1):
            times = [experiment.now()]
            extension = _extension(method, recipe, model, experiment, step, seed)
            branch, _ = extension.train_branch()
            model = model.extended(branch).to(experiment.device)
            times.append(experiment.now())
            if extension.needs_fusion():
                model.fused.deltas = list(extension.fuse(model).at(0, 0))
            times.append(experiment.now())
            space = experiment.space(step)
            dev, test = (_columns(experiment, model, half, step) for half in experiment.halves(step))
            for goal, found in score_dial(dev, test, space, PAPER_GOALS, method.pooler).items():
                scored[goal].append(found)
            if seed == seeds[0] and experiment.steps == 1:
                measured.curve = curve(dial_frontier(*test, space, method.pooler), ("b",))
            times.append(experiment.now())
            for part, duration in zip(took, np.diff(times), strict=True):
                took[part] += float(duration)
        for goal in PAPER_GOALS:
            measured.points[goal].append(scored[goal])
        seconds.append(took)
        measured.parameters = _without_heads(model)
    measured.seconds = {part: float(np.median([each[part] for each in seconds])) for part in seconds[0]}
    return measured


def _extension(
    method: Method, recipe: Recipe, model: Classifier, experiment: Experiment, step: int, seed: int
) -> Extension:
    """One step of the experiment as `branchout extend` runs it."""
    dev, test = experiment.halves(step)
    split = DataSplit(experiment.training_images(step), experiment.memory(step, seed), dev, test, "dev")
    config = ExtendConfig(
        recipe=recipe.name,
        branch=method.branch,
        fuse=method.fuse,
        exemplars=experiment.per_class(step),
        epochs=experiment.plan.epochs,
        seed=seed,
    )
    return Extension(model, split, config, device=experiment.device, images=experiment.images, report=experiment.report)


def _grid(method: Method, recipe: Recipe, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    """The paper's recipes: the whole grid for all exemplar seeds in one pass, whose time is divided among them."""
    measured = Measured(
        {goal: [[] for _ in seeds] for goal in PAPER_GOALS}, {"stage1": 0.0, "cache": 0.0, "fusion": 0.0}
    )
    for step in range(1, experiment.steps + 1):
        model, stage_one = experiment.branched(step, recipe.stage_one, method.branch)
        model = model.rebuilt(model.steps, method.pooler).to(experiment.device)
        start = experiment.now()
        data = [_fusion_data(recipe, model, experiment, step, seed) for seed in seeds]
        halves = [
            (experiment.features(model, half)[0], experiment.labels(half, step)) for half in experiment.halves(step)
        ]
        cached = experiment.now()
        settings = replace(recipe.stage_two, optimisation=experiment.fusion(recipe.stage_two.optimisation))
        fused = fuse(problem_of(model), data, settings, per_class=experiment.per_class(step))
        end = experiment.now()
        for number in range(len(seeds)):
            space = experiment.space(step)
            dev, test = ((grid_answers(model, h, fused, number).cpu().numpy(), labels) for h, labels in halves)
            for goal in PAPER_GOALS:
                found = score_grid(dev, test, space, fused.grid, goal, recipe.balanced)
                measured.points[goal][number].append(found)
            if number == 0:
                measured.curve = curve(grid_frontier(*test, space, fused.grid, recipe.balanced), ("alpha", "beta"))
        measured.seconds["stage1"] += stage_one[-1]
        measured.seconds["cache"] += (cached - start) / len(seeds)
        measured.seconds["fusion"] += (end - cached) / len(seeds)
        if step == 1:
            measured.extra["novel_alone"] = _novel_alone(experiment, model)
        measured.parameters = _without_heads(model)
    return measured


def _fusion_data(recipe: Recipe, model: Classifier, experiment: Experiment, step: int, seed: int) -> FusionData:
    """What stage II sees: the exemplars, and as many images of each new class."""
    kept = experiment.kept(step, experiment.per_class(step), seed)
    seen = concatenate([experiment.memory(step, seed), kept])
    features = experiment.features(model, seen, recipe.stage_two.views, seed)
    labels, origin = (
        torch.from_numpy(each).to(experiment.device) for each in (experiment.labels(seen, step), seen.origin)
    )
    return fusion_data(model, features, labels, origin)


def _stage_one_dial(experiment: Experiment) -> Measured:
    """The paper's stage I with the dial alone. No exemplar is used, so there is one seed only."""
    measured = Measured({goal: [[]] for goal in PAPER_GOALS}, {"stage1": 0.0})
    for step in range(1, experiment.steps + 1):
        model, stage_one = experiment.branched(step, PAPER.stage_one)
        dev, test = (_columns(experiment, model, half, step) for half in experiment.halves(step))
        for goal, scored in score_dial(dev, test, experiment.space(step), PAPER_GOALS).items():
            measured.points[goal][0].append(scored)
        measured.seconds["stage1"] += stage_one[-1]
        measured.parameters = _without_heads(model)
    return measured


def _columns(experiment: Experiment, model: Classifier, half: Samples, step: int) -> tuple[Floats, Ints]:
    """Logits of every column before the dial, and labels."""
    return logit_columns(model, experiment.features(model, half)[0]), experiment.labels(half, step)


def _alone(where: str, experiment: Experiment) -> Measured:
    """The paper's motivation: how well a branch that fine-tunes more or less of the network learns the new classes."""
    model, stage_one = experiment.branched(1, PAPER.stage_one, where)
    folds = [_branch_predictions(experiment, model, half) for half in reversed(experiment.halves(1))]
    scored = Scored.of("alone", (), [accuracies(*fold, experiment.space(1)) for fold in folds])
    extra = {"novel_alone": _novel_alone(experiment, model)}
    return Measured({"alone": [[scored]]}, {"stage1": stage_one[-1]}, _without_heads(model), extra)


def _novel_alone(experiment: Experiment, model: Classifier) -> float:
    """Accuracy of the new branch among its own classes, on all their validation images."""
    answers, labels = _branch_predictions(experiment, model, concatenate(experiment.halves(1)))
    return float((answers == labels).mean())


def _branch_predictions(experiment: Experiment, model: Classifier, half: Samples) -> tuple[Ints, Ints]:
    """Predictions of the first step's branch alone for images of its classes, and labels."""
    columns, labels = _columns(experiment, model, half.of_classes(experiment.scenario.branches[1]), 1)
    own = experiment.space(1).slice_of(1)
    return experiment.space(1).class_of_column[own][columns[:, own].argmax(1)], labels


def _without_heads(model: Classifier) -> int:
    return sum(count for part, count in model.parameter_counts().items() if part not in ("heads", "deltas"))
