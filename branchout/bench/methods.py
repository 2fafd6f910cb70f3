"""Who takes part in a table: our method in its variants, and every baseline. Each is measured in the same way.

A method is run once for each exemplar seed (or for all of them in one pass), step by step; after each step its
operating points are chosen on dev and measured on test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from branchout.baselines.networks import OnFeatures, scores_of
from branchout.baselines.registry import Baseline, baselines
from branchout.bench.experiment import Experiment
from branchout.data.images import Images, in_order
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.method.config import ExtendConfig
from branchout.method.dial import dial_frontier
from branchout.method.extend import Extension
from branchout.method.frontier import Frontier, grid_frontier
from branchout.method.recipes import PAPER, RECIPES, Recipe, recipe_named
from branchout.method.score_fusion import fusion_data, problem_of
from branchout.method.split import DataSplit
from branchout.method.stage2 import fuse, grid_answers
from branchout.method.two_fold import Scored, score_dial, score_grid
from branchout.metrics import Accuracies, accuracies
from branchout.model.classifier import Classifier
from branchout.training.optimisation import settings_dict

GOALS = ("all", "balanced", "avg")


@dataclass(frozen=True)
class Method:
    """One way to learn new classes, by the name that `bench` knows it under."""

    name: str
    label: str
    recipe: str | None = None
    """Of our own methods: how stages I and II are trained."""
    branch: str = "last"
    pooler: str = "max"
    fuse: bool = False
    baseline: Baseline | None = None

    @property
    def result_name(self) -> str:
        """Its name in result rows, where the recipe is a field of its own."""
        return self.name.removesuffix(f"-{self.recipe}") if self.recipe else self.name

    def seeds(self, asked: Sequence[int], steps: int) -> tuple[int, ...]:
        """The exemplar seeds it is run with: one must do where each of them trains a whole network or many branches."""
        network = self.baseline is not None and self.baseline.on == "network"
        branches = steps > 1 and self.recipe is not None and recipe_named(self.recipe).stage_one.replay
        return tuple(asked[:1]) if network or branches else tuple(asked)

    def settings(self) -> dict[str, Any]:
        """What a row says of how it was made, beside the plan."""
        ours = self.baseline is None
        return {
            "recipe": settings_dict(recipe_named(self.recipe)) if self.recipe else None,
            "branch": self.branch if ours else None,
            "pooler": self.pooler if ours else None,
            **({"fuse": True} if self.fuse else {}),  # where deltas are learned though the recipe does without
        }

    def points(self) -> tuple[str, ...]:
        """The operating points it is measured at, each of them one row."""
        if self.name.startswith("alone-"):
            return ("alone",)
        if self.baseline is None:
            return GOALS
        return ("plain", *(f"dial-{goal}" for goal in GOALS)) if self.baseline.dial else ("plain",)


@dataclass
class Measured:
    """What came out: for each operating point, exemplar seed and step what was chosen and measured."""

    points: dict[str, list[list[Scored]]]
    seconds: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    """All parameters after the last step, heads apart."""
    extra: dict[str, float] = field(default_factory=dict)
    both: list[list[Accuracies]] = field(default_factory=list)
    """For each seed and step what answers as they are reach on dev and test together: nothing was chosen on dev."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """All operating points of the first seed after the last step, measured on test: settings, all, base, novel, avg."""


OURS = (
    Method("score-fusion-branchout", "Branchout's recipe, the dial", "branchout"),
    Method("score-fusion-deltas-branchout", "Branchout's recipe with deltas, the dial", "branchout", fuse=True),
    Method(
        "score-fusion-average-branchout", "Branchout's recipe, average pooling, the dial", "branchout", pooler="average"
    ),
    *(
        Method(f"score-fusion{suffix}-{recipe}", f"score fusion{told}, recipe {recipe}", recipe, branch, pooler)
        for recipe in ("reference", "paper")
        for suffix, told, branch, pooler in (
            ("", "", "last", "max"),
            ("-average", " with average pooling", "last", "average"),
            ("-fc", " fc-only", "fc", "max"),
            ("-layer3", " layer3,4", "layer3", "max"),
            ("-conv2", " layer4 (conv2 only)", "layer4.0.conv2", "max"),
        )
    ),
    Method("stage-one-dial", "the paper's stage I, nothing fused, the dial", "paper"),
    *(
        Method(f"alone-{where}", f"new classes alone, {told}", "paper", where)
        for where, told in (
            ("fc", "features as they are"),
            ("layer4", "fine-tuned from layer4"),
            ("layer3", "fine-tuned from layer3"),
            ("layer2", "fine-tuned from layer2"),
            ("layer1", "fine-tuned from layer1"),
            ("stem", "fine-tuned throughout"),
        )
    ),
)


@cache
def methods() -> dict[str, Method]:
    """Everyone, ours first."""
    others = (Method(method.name, method.label, baseline=method) for method in baselines().values())
    return {method.name: method for method in (*OURS, *others)}


def method_named(name: str) -> Method:
    """By its name, or by the recipe alone: `branchout`, `reference`, `paper`."""
    known = methods()
    name = f"score-fusion-{name}" if name in RECIPES else name
    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise BranchoutError(f"no method is called {name!r}{hint} All are named by: branchout bench --list")
    return known[name]


def measure(method: Method, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    """Run a method through all steps of an experiment."""
    assert experiment.base is not None  # trained before any clock starts
    if method.baseline is not None:
        return _baseline(method.baseline, experiment, seeds)
    assert method.recipe is not None
    recipe = recipe_named(method.recipe)
    if method.name == "stage-one-dial":
        return _stage_one_dial(experiment)
    if method.points() == ("alone",):
        return _alone(method.branch, experiment)
    return (_dial if recipe.dial else _grid)(method, recipe, experiment, seeds)


# Ours.


def _dial(method: Method, recipe: Recipe, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    """The recipe with the dial, through the same code as `branchout extend`."""
    measured = Measured({goal: [] for goal in GOALS})
    took: list[dict[str, float]] = []
    for seed in seeds:
        model = experiment.base.rebuilt((), method.pooler)
        scored: dict[str, list[Scored]] = {goal: [] for goal in GOALS}
        seconds = {"stage1": 0.0, "fusion": 0.0, "choice": 0.0}
        for step in range(1, experiment.steps + 1):
            start = experiment.now()
            dev, test = experiment.halves(step)
            material = DataSplit(experiment.training_images(step), experiment.memory(step, seed), dev, test, "dev")
            request = ExtendConfig(
                recipe=recipe.name,
                branch=method.branch,
                fuse=method.fuse,
                exemplars=experiment.per_class(step),
                epochs=experiment.plan.epochs,
                seed=seed,
            )
            extension = Extension(
                model, material, request, device=experiment.device, images=experiment.images, report=experiment.report
            )
            learned, _ = extension.train_branch()
            model = model.extended(learned).to(experiment.device)
            after_one = experiment.now()
            if extension.needs_fusion():
                model.fused.deltas = list(extension.fuse(model).at(0, 0))
            after_two = experiment.now()
            halves = [_columns(experiment, model, half, step) for half in (dev, test)]
            found = score_dial(halves[0], halves[1], experiment.space(step), GOALS, method.pooler)
            for goal in GOALS:
                scored[goal].append(found[goal])
            if seed == seeds[0] and experiment.steps == 1:
                measured.curve = _curve(dial_frontier(*halves[1], experiment.space(step), method.pooler), ("b",))
            seconds["stage1"] += after_one - start
            seconds["fusion"] += after_two - after_one
            seconds["choice"] += experiment.now() - after_two
        for goal in GOALS:
            measured.points[goal].append(scored[goal])
        took.append(seconds)
        measured.parameters = _without_heads(model)
    measured.seconds = {key: float(np.median([each[key] for each in took])) for key in took[0]}
    return measured


def _grid(method: Method, recipe: Recipe, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    """The paper's recipes: the whole grid for all exemplar seeds in one pass, whose time is shared out among them."""
    measured = Measured({goal: [[] for _ in seeds] for goal in GOALS}, {"stage1": 0.0, "cache": 0.0, "fusion": 0.0})
    for step in range(1, experiment.steps + 1):
        model, stage_one = experiment.branched(step, recipe.stage_one, method.branch)
        model = model.rebuilt(model.steps, method.pooler).to(experiment.device)
        start = experiment.now()
        data = []
        for seed in seeds:
            kept = experiment.kept(step, experiment.per_class(step), seed)
            seen = concatenate([experiment.memory(step, seed), kept])
            features = experiment.features(model, seen, recipe.stage_two.views, seed)
            facts = (experiment.labels(seen, step), seen.origin)
            data.append(fusion_data(model, features, *(torch.from_numpy(x).to(experiment.device) for x in facts)))
        halves = [experiment.features(model, half)[0] for half in experiment.halves(step)]
        cached = experiment.now()
        settings = recipe.stage_two
        if experiment.plan.fusion_epochs is not None:
            epochs = experiment.plan.fusion_epochs
            settings = replace(settings, optimisation=replace(settings.optimisation, epochs=epochs))
        fused = fuse(problem_of(model), data, settings, per_class=experiment.per_class(step))
        fused_at = experiment.now()
        labels = [experiment.labels(half, step) for half in experiment.halves(step)]
        for number in range(len(seeds)):
            answers = [grid_answers(model, half, fused, number).cpu().numpy() for half in halves]
            dev, test = ((a, y) for a, y in zip(answers, labels, strict=True))
            for goal in GOALS:
                measured.points[goal][number].append(
                    score_grid(dev, test, experiment.space(step), fused.grid, goal, recipe.balanced)
                )
            if number == 0:
                whole = grid_frontier(*test, experiment.space(step), fused.grid, recipe.balanced)
                measured.curve = _curve(whole, ("alpha", "beta"))
        measured.seconds["stage1"] += stage_one[-1]
        measured.seconds["cache"] += (cached - start) / len(seeds)
        measured.seconds["fusion"] += (fused_at - cached) / len(seeds)
        if step == 1:
            measured.extra["novel_alone"] = _novel_alone(experiment, model)
        measured.parameters = _without_heads(model)
    return measured


def _stage_one_dial(experiment: Experiment) -> Measured:
    """What the dial alone makes of the paper's stage I: no exemplar is used, so there is one seed only."""
    measured = Measured({goal: [[]] for goal in GOALS}, {"stage1": 0.0})
    for step in range(1, experiment.steps + 1):
        model, stage_one = experiment.branched(step, PAPER.stage_one)
        halves = [_columns(experiment, model, half, step) for half in experiment.halves(step)]
        for goal, scored in score_dial(halves[0], halves[1], experiment.space(step), GOALS).items():
            measured.points[goal][0].append(scored)
        measured.seconds["stage1"] += stage_one[-1]
        measured.parameters = _without_heads(model)
    return measured


def _curve(points: Frontier, names: Sequence[str], most: int = 60) -> list[dict[str, float]]:
    """All points of a frontier, or of very many some at even distances."""
    chosen = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).round().astype(int))
    figures = ("all", "base", "novel", "avg")
    return [
        dict(zip(names, points.settings[n].tolist(), strict=True))
        | {name: round(100 * float(points.figures[name][n]), 3) for name in figures if points.figures[name][n] >= 0}
        for n in chosen
    ]


def _columns(experiment: Experiment, model: Classifier, half: Samples, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of every column before the dial, and labels."""
    features = experiment.features(model, half)[0]
    with torch.no_grad():
        columns = model.fused.columns(features.unbind(1)).double().cpu().numpy()
    return columns, experiment.labels(half, step)


def _alone(where: str, experiment: Experiment) -> Measured:
    """The paper's motivation: how well a branch that fine-tunes more or less of the network learns the new classes."""
    model, stage_one = experiment.branched(1, PAPER.stage_one, where)
    folds = [_own_answers(experiment, model, half) for half in reversed(experiment.halves(1))]
    found = [accuracies(*fold, experiment.space(1)) for fold in folds]
    values = [fold.all for fold in found]
    scored = Scored("alone", (), found[0], float(np.mean(values)), abs(values[0] - values[1]) / 2)
    extra = {"novel_alone": _novel_alone(experiment, model)}
    return Measured({"alone": [[scored]]}, {"stage1": stage_one[-1]}, _without_heads(model), extra)


def _novel_alone(experiment: Experiment, model: Classifier) -> float:
    """How well the new branch tells its own classes apart on all validation images, asked about nothing else."""
    answers, labels = _own_answers(experiment, model, concatenate(experiment.halves(1)))
    return float((answers == labels).mean())


def _own_answers(experiment: Experiment, model: Classifier, half: Samples) -> tuple[np.ndarray, np.ndarray]:
    """What the first step's branch alone answers for images of its classes, and the truth."""
    columns, labels = _columns(experiment, model, half.of_classes(experiment.scenario.branches[1]), 1)
    own = experiment.space(1).slice_of(1)
    return experiment.space(1).class_of_column[own][columns[:, own].argmax(1)], labels


def _without_heads(model: Classifier) -> int:
    return sum(count for part, count in model.parameter_counts().items() if part not in ("heads", "deltas"))


# The others.


def _baseline(method: Baseline, experiment: Experiment, seeds: Sequence[int]) -> Measured:
    measured = Measured({point: [] for point in Method("", "", baseline=method).points()})
    took: list[float] = []
    for seed in seeds if method.seeded else seeds[:1]:
        scored: dict[str, list[Scored]] = {point: [] for point in measured.points}
        seconds = 0.0
        both: list[Accuracies] = []
        for step, scorer, spent in _steps(method, experiment, seed):
            seconds += spent
            halves = [_scores(experiment, scorer, half, step) for half in experiment.halves(step)]
            for point, result in _points(halves, experiment.space(step), method.dial):
                scored[point].append(result)
            if method.dial and seed == seeds[0] and experiment.steps == 1:
                space = experiment.space(step)
                scores, labels = halves[1]
                columns = scores[:, space.class_of_column]
                measured.curve = _curve(dial_frontier(columns, labels, space), ("b",))
            answers, labels = (np.concatenate(x) for x in zip(*((z.argmax(1), y) for z, y in halves), strict=True))
            both.append(accuracies(answers, labels, experiment.space(step)))
        for point, results in scored.items():
            measured.points[point].append(results)
        measured.both.append(both)
        took.append(seconds)
        measured.parameters = sum(
            parameter.numel()
            for name, parameter in scorer.named_parameters()
            if not {"head", "heads"} & set(name.split("."))
        )
        measured.parameters += _stored(scorer)
    measured.seconds = {"train": float(np.median(took))}
    return measured


def _stored(scorer: nn.Module) -> int:
    """How many numbers a method keeps beside its parameters, where it says so itself or its head does."""
    for part in (scorer, getattr(scorer, "head", None)):
        stored = getattr(part, "stored", None)
        if stored is not None:
            return int(stored())
    return 0


def _steps(method: Baseline, experiment: Experiment, seed: int) -> Iterator[tuple[int, nn.Module, float]]:
    """The method's classifier after each step, or after the last if that hangs on none before; and how long it took."""
    before: nn.Module = experiment.base
    rankings: dict[int, Samples] = {}
    for step in [experiment.steps] if method.anew else range(1, experiment.steps + 1):
        task = experiment.task(step, seed, rankings)
        shared = 0.0
        if method.on == "features":
            before, stage_one = experiment.branched(step, PAPER.stage_one)
            shared = stage_one[-1]
        start = experiment.now()
        before = method.learn(before, task).to(experiment.device)
        yield step, before, shared + experiment.now() - start
        if experiment.plan.memory == "herding" and step < experiment.steps:
            features = _own_features(before, experiment.images(experiment.training_images(step)))
            if features is not None:
                rankings[step] = experiment.ranked(step, features)


@torch.no_grad()
def _own_features(scorer: nn.Module, images: Images) -> np.ndarray | None:
    """What the network that a method has trained makes of pictures; None if it builds on a frozen one."""
    network = getattr(scorer, "network", scorer)
    features = None if isinstance(network, Classifier | OnFeatures) else getattr(network, "features", None)
    if features is None:
        return None
    scorer.eval()
    found = [features(pictures) for pictures in images.plain(in_order(len(images), 500))]
    rows: np.ndarray = torch.cat(found).float().cpu().numpy()
    return rows


def _scores(experiment: Experiment, scorer: nn.Module, half: Samples, step: int) -> tuple[np.ndarray, np.ndarray]:
    """One score per class for every image, and labels."""
    if isinstance(scorer, OnFeatures):
        features = experiment.features(scorer.model, half)[0]
        with torch.no_grad():
            scores = scorer.head.eval()(features)
    else:
        scores = scores_of(scorer, experiment.images(half))
    return scores.double().cpu().numpy(), experiment.labels(half, step)


def _points(
    halves: Sequence[tuple[np.ndarray, np.ndarray]], space: LabelSpace, dial: bool
) -> Iterator[tuple[str, Scored]]:
    """The answers as they are, and with the dial. A class of several branches has its one score in each column."""
    folds = [accuracies(scores.argmax(1), labels, space) for scores, labels in reversed(halves)]
    values = [fold.all for fold in folds]
    yield "plain", Scored("plain", (), folds[0], float(np.mean(values)), abs(values[0] - values[1]) / 2)
    if dial:
        dev, test = ((scores[:, space.class_of_column], labels) for scores, labels in halves)
        for goal, scored in score_dial(dev, test, space, GOALS).items():
            yield f"dial-{goal}", replace(scored, goal=f"dial-{goal}")
