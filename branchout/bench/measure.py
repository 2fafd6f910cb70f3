"""Measure a method in an experiment: train it step by step, choose operating points on dev, measure them on test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from branchout.baselines.networks import OnFeatures, scores_of
from branchout.baselines.task import Baseline
from branchout.bench.experiment import Experiment
from branchout.bench.methods import WITHOUT_EXEMPLARS, Method
from branchout.bench.plan import Plan
from branchout.data.images import Images, in_order
from branchout.data.samples import Samples, concatenate
from branchout.errors import DoesNotApply
from branchout.evaluate.two_fold import Scored, score_dial, score_grid
from branchout.goals import PAPER_GOALS
from branchout.labels import Ints, LabelSpace
from branchout.method.config import ExtendConfig
from branchout.method.dial import dial_frontier, own_columns
from branchout.method.extend import Extension
from branchout.method.features import logit_columns
from branchout.method.frontier import Frontier, grid_frontier
from branchout.method.recipes import PAPER, Recipe, recipe_named
from branchout.method.score_fusion import Stage2Data, head_layout, stage2_data
from branchout.method.split import DataSplit
from branchout.method.stage2 import grid_predictions, train_grid
from branchout.model.classifier import Classifier

ScoresAndLabels = tuple[npt.NDArray[np.float64], Ints]
"""Scores (images × classes or columns) and labels."""


@dataclass
class Measured:
    """A method measured with one exemplar seed: for each operating point, the setting and accuracies of each step."""

    points: dict[str, list[Scored]]
    seconds: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    """All parameters after the last step, without heads."""
    extra: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    """All operating points after the last step, measured on test: settings, all, base, novel, avg."""
    first: Scored | None = None
    """The method's own base, where it does not start from the shared one."""
    base_parameters: int = 0
    """Of that base, without its head; of joint training its own, because it adds nothing."""
    views: int | None = None
    """Of each new image, in our stage I: as many as this device is given."""
    peak_memory: int | None = None
    """In bytes, of the job so far."""
    gpu_shared: bool = False
    """Whether other processes used the GPU."""


OnStep = Callable[[Measured], None]
"""Called after every step, so that what was measured is kept if a later step is interrupted."""


def uses_seeds(method: Method) -> bool:
    """Whether there is a result for each exemplar seed; otherwise there is one."""
    if method.baseline is not None:
        return method.baseline.seeded
    return method.name != "stage-one-dial" and method.points() != ("alone",)


def starts_from_base(method: Method, plan: Plan) -> bool:
    """Whether it needs the shared base: not if it trains all classes from scratch, or its own base as published."""
    baseline = method.baseline
    return baseline is None or not (baseline.anew or (plan.faithful and baseline.published))


def measure(method: Method, experiment: Experiment, seed: int, on_step: OnStep = lambda measured: None) -> Measured:
    """Run a method through all steps of an experiment, with one exemplar seed."""
    if experiment.per_class(1) == 0 and method.name not in WITHOUT_EXEMPLARS:
        raise DoesNotApply(f"{method.name} needs exemplars of old classes, and --exemplars 0 leaves it none")
    if method.baseline is not None:
        return _baseline(method, experiment, seed, on_step)
    assert experiment.base is not None  # trained before any clock starts
    assert method.recipe is not None
    recipe = recipe_named(method.recipe)
    if method.name == "stage-one-dial":
        return _stage_one_dial(experiment)
    if method.points() == ("alone",):
        return _alone(method.branch, experiment)
    return (_dial if recipe.dial else _grid)(method, recipe, experiment, seed, on_step)


def curve(frontier: Frontier, names: Sequence[str], most: int = 60) -> list[dict[str, float]]:
    """The points of a frontier; of very many, some at even distances."""
    chosen = np.unique(np.linspace(0, len(frontier) - 1, min(most, len(frontier))).round().astype(int))
    shown = {name: frontier.accuracies[name] for name in ("all", "base", "novel", "avg")}
    return [
        dict(zip(names, frontier.settings[n].tolist(), strict=True))
        | {name: round(100 * float(values[n]), 3) for name, values in shown.items() if values[n] >= 0}
        for n in chosen
    ]


# Score fusion.


def _dial(method: Method, recipe: Recipe, experiment: Experiment, seed: int, on_step: OnStep) -> Measured:
    """The recipe with the dial, by the same code as `branchout extend`."""
    measured = Measured({goal: [] for goal in PAPER_GOALS}, {"stage1": 0.0, "fusion": 0.0, "choice": 0.0})
    model = experiment.base.rebuilt((), method.pooler)
    for step in range(1, experiment.steps + 1):
        times = [experiment.now()]
        extension = _extension(method, recipe, model, experiment, step, seed)
        measured.views = extension.plan.effort.views
        branch, _ = extension.train_branch()
        model = model.extended(branch).to(experiment.device)
        times.append(experiment.now())
        if extension.needs_deltas():
            model.fused.deltas = list(extension.train_deltas(model).at(0, 0))
        times.append(experiment.now())
        space = experiment.space(step)
        dev, test = (_columns(experiment, model, half, step) for half in experiment.halves(step))
        for goal, found in score_dial(dev, test, space, PAPER_GOALS, method.pooler).items():
            measured.points[goal].append(found)
        times.append(experiment.now())
        _add(measured.seconds, np.diff(times))
        if experiment.steps == 1:
            measured.curve = curve(dial_frontier(*test, space, method.pooler), ("b",))
        on_step(measured)
    measured.parameters = _without_heads(model)
    return measured


def _extension(
    method: Method, recipe: Recipe, model: Classifier, experiment: Experiment, step: int, seed: int
) -> Extension:
    """One step of the experiment as `branchout extend` runs it."""
    dev, test = experiment.halves(step)
    memory = experiment.memory(step, seed)
    split = DataSplit(experiment.training_images(step), memory if len(memory) else None, dev, test, "dev")
    config = ExtendConfig(
        recipe=recipe.name,
        branch=method.branch,
        fuse=method.fuse,
        exemplars=max(experiment.per_class(step), 1),
        epochs=experiment.plan.epochs,
        seed=seed,
    )
    return Extension(
        model, split, config, device=experiment.device, images=experiment.images, on_progress=experiment.on_progress
    )


def _grid(method: Method, recipe: Recipe, experiment: Experiment, seed: int, on_step: OnStep) -> Measured:
    """The paper's recipes: a branch for each seed, and the whole grid on it in one pass."""
    measured = Measured({goal: [] for goal in PAPER_GOALS}, {"stage1": 0.0, "cache": 0.0, "fusion": 0.0})
    settings = replace(recipe.stage_two, optimisation=experiment.fusion(recipe.stage_two.optimisation))
    for step in range(1, experiment.steps + 1):
        space = experiment.space(step)
        model, stage_one = experiment.branched(step, recipe.stage_one, method.branch, seed)
        model = model.rebuilt(model.steps, method.pooler).to(experiment.device)
        times = [experiment.now()]
        data = _fusion_data(recipe, model, experiment, step, seed)
        halves = [
            (experiment.features(model, half)[0], experiment.labels(half, step)) for half in experiment.halves(step)
        ]
        times.append(experiment.now())
        trained = train_grid(head_layout(model), [data], settings, per_class=experiment.per_class(step))
        times.append(experiment.now())
        _add(measured.seconds, [stage_one[-1], *np.diff(times)])
        dev, test = ((grid_predictions(model, h, trained).cpu().numpy(), labels) for h, labels in halves)
        for goal in PAPER_GOALS:
            measured.points[goal].append(score_grid(dev, test, space, trained.grid, goal, recipe.balanced))
        measured.curve = curve(grid_frontier(*test, space, trained.grid, recipe.balanced), ("alpha", "beta"))
        if step == 1:
            measured.extra["novel_alone"] = _novel_alone(experiment, model)
        on_step(measured)
    measured.parameters = _without_heads(model)
    return measured


def _add(seconds: dict[str, float], durations: Iterable[float]) -> None:
    """Add the durations of one step to its parts, in their order."""
    for part, duration in zip(seconds, durations, strict=True):
        seconds[part] += float(duration)


def _fusion_data(recipe: Recipe, model: Classifier, experiment: Experiment, step: int, seed: int) -> Stage2Data:
    """What stage II sees: the exemplars, and as many images of each new class."""
    kept = experiment.kept(step, experiment.per_class(step), seed)
    seen = concatenate([experiment.memory(step, seed), kept])
    features = experiment.features(model, seen, recipe.stage_two.views, seed)
    labels, origin = (
        torch.from_numpy(each).to(experiment.device) for each in (experiment.labels(seen, step), seen.origin)
    )
    return stage2_data(model, features, labels, origin)


def _stage_one_dial(experiment: Experiment) -> Measured:
    """The paper's stage I with the dial alone. No exemplar is used, so there is one result."""
    measured = Measured({goal: [] for goal in PAPER_GOALS}, {"stage1": 0.0})
    for step in range(1, experiment.steps + 1):
        model, stage_one = experiment.branched(step, PAPER.stage_one)
        dev, test = (_columns(experiment, model, half, step) for half in experiment.halves(step))
        for goal, scored in score_dial(dev, test, experiment.space(step), PAPER_GOALS).items():
            measured.points[goal].append(scored)
        measured.seconds["stage1"] += stage_one[-1]
        measured.parameters = _without_heads(model)
    return measured


def _columns(experiment: Experiment, model: Classifier, half: Samples, step: int) -> ScoresAndLabels:
    """Logits of every column before the dial, and labels."""
    return logit_columns(model, experiment.features(model, half)[0]), experiment.labels(half, step)


def _alone(where: str, experiment: Experiment) -> Measured:
    """The paper's motivation: how well a branch that fine-tunes more or less of the network learns the new classes."""
    model, stage_one = experiment.branched(1, PAPER.stage_one, where)
    folds = [_branch_predictions(experiment, model, half) for half in reversed(experiment.halves(1))]
    answers, labels = zip(*folds, strict=True)
    scored = Scored.of("alone", (), answers, labels, experiment.space(1))
    extra = {"novel_alone": _novel_alone(experiment, model)}
    return Measured({"alone": [scored]}, {"stage1": stage_one[-1]}, _without_heads(model), extra)


def _novel_alone(experiment: Experiment, model: Classifier) -> float:
    """Accuracy of the new branch among its own classes, on all their validation images."""
    answers, labels = _branch_predictions(experiment, model, concatenate(experiment.halves(1)))
    return float((answers == labels).mean())


def _branch_predictions(experiment: Experiment, model: Classifier, half: Samples) -> tuple[Ints, Ints]:
    """Predictions of the first step's branch alone for images of its classes, and labels."""
    columns, labels = _columns(experiment, model, half.of_classes(experiment.scenario.branches[1]), 1)
    own = experiment.space(1).slice_of(1)
    return experiment.space(1).class_of_column[own][columns[:, own].argmax(1)], labels


# Baselines: as they are, and with the dial where their scores are logits.


def _baseline(method: Method, experiment: Experiment, seed: int, on_step: OnStep) -> Measured:
    assert method.baseline is not None
    measured = Measured({point: [] for point in method.points()}, {"train": 0.0})
    for step, scorer, spent in _steps(method.baseline, experiment, seed):
        space = experiment.space(step)
        dev, test = (_scores(experiment, scorer, half, step) for half in experiment.halves(step))
        if step == 0:
            measured.first = dict(_points(dev, test, space, dial=False))["plain"]
            measured.base_parameters = _of_network(scorer)
            continue
        measured.seconds["train"] += spent
        for point, result in _points(dev, test, space, method.baseline.dial):
            measured.points[point].append(result)
        if method.baseline.dial and experiment.steps == 1:
            measured.curve = curve(dial_frontier(own_columns(test[0], space), test[1], space), ("b",))
        on_step(measured)
    measured.parameters = _of_network(scorer) + _stored(scorer)
    if method.baseline.anew:
        measured.base_parameters = measured.parameters
    return measured


def _steps(baseline: Baseline, experiment: Experiment, seed: int) -> Iterator[tuple[int, nn.Module, float]]:
    """The scorer after each step, or after the last only if it does not depend on earlier ones; and its seconds.

    A method that is trained as published starts with step 0, its own base.
    """
    published = baseline.published if experiment.plan.faithful else None
    learn = baseline.learn if published is None else published.learn
    rankings: dict[int, Samples] = {}
    if published is None:
        before: nn.Module = experiment.shape_of_base if baseline.anew else experiment.base
    else:
        before = published.first(experiment.task(0, seed)).to(experiment.device)
        yield 0, before, 0.0
        rankings |= _ranking(before, experiment, 0)
    for step in [experiment.steps] if baseline.anew else range(1, experiment.steps + 1):
        task = experiment.task(step, seed, rankings, exemplars=not baseline.anew)
        shared = 0.0
        if baseline.on == "features":
            before, stage_one = experiment.branched(step, PAPER.stage_one, seed=seed)
            shared = stage_one[-1]
        start = experiment.now()
        before = learn(before, task).to(experiment.device)
        yield step, before, shared + experiment.now() - start
        if step < experiment.steps:
            rankings |= _ranking(before, experiment, step)


def _ranking(scorer: nn.Module, experiment: Experiment, step: int) -> dict[int, Samples]:
    """The images of a step as herding on the method's own features ranks them, where exemplars are herded."""
    if experiment.plan.memory != "herding":
        return {}
    features = _own_features(scorer, experiment.images(experiment.training_images(step)))
    return {} if features is None else {step: experiment.ranked(step, features)}


@torch.no_grad()
def _own_features(scorer: nn.Module, images: Images) -> np.ndarray | None:
    """Features of images by the network that a baseline has trained; None if it builds on a frozen one."""
    network = getattr(scorer, "network", scorer)
    features = None if isinstance(network, Classifier | OnFeatures) else getattr(network, "features", None)
    if features is None:
        return None
    scorer.eval()
    found = [features(pictures) for pictures in images.plain(in_order(len(images), 500))]
    rows: np.ndarray = torch.cat(found).float().cpu().numpy()
    return rows


def _scores(experiment: Experiment, scorer: nn.Module, half: Samples, step: int) -> ScoresAndLabels:
    if isinstance(scorer, OnFeatures):
        features = experiment.features(scorer.model, half)[0]
        with torch.no_grad():
            scores = scorer.head.eval()(features)
    else:
        scores = scores_of(scorer, experiment.images(half))
    return scores.double().cpu().numpy(), experiment.labels(half, step)


def _points(dev: ScoresAndLabels, test: ScoresAndLabels, space: LabelSpace, dial: bool) -> Iterator[tuple[str, Scored]]:
    """The predictions as they are, and with the dial."""
    answers, labels = zip(*((scores.argmax(1), labels) for scores, labels in (test, dev)), strict=True)
    yield "plain", Scored.of("plain", (), answers, labels, space)
    if dial:
        columns = [(own_columns(scores, space), labels) for scores, labels in (dev, test)]
        for goal, scored in score_dial(columns[0], columns[1], space, PAPER_GOALS).items():
            yield f"dial-{goal}", replace(scored, goal=f"dial-{goal}")


# Sizes.


def _without_heads(model: Classifier) -> int:
    return sum(count for part, count in model.parameter_counts().items() if part not in ("heads", "deltas"))


def _of_network(scorer: nn.Module) -> int:
    """Parameters without heads."""
    named = scorer.named_parameters()
    return sum(each.numel() for name, each in named if not {"head", "heads"} & set(name.split(".")))


def _stored(scorer: nn.Module) -> int:
    """How many numbers a method stores beside its parameters, where it or its head says so."""
    for part in (scorer, getattr(scorer, "head", None)):
        stored = getattr(part, "stored", None)
        if stored is not None:
            return int(stored())
    return 0
