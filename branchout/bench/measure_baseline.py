"""Measure a baseline in an experiment: as it is, and with the dial where its scores are logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from branchout.baselines.networks import OnFeatures, scores_of
from branchout.baselines.registry import Baseline
from branchout.bench.experiment import Experiment
from branchout.bench.measured import Measured, curve
from branchout.data.images import Images, in_order
from branchout.data.samples import Samples
from branchout.labels import LabelSpace
from branchout.method.dial import dial_frontier, own_columns
from branchout.method.recipes import PAPER
from branchout.method.two_fold import Scored, score_dial
from branchout.metrics import PAPER_GOALS, Accuracies, accuracies
from branchout.model.classifier import Classifier

Half = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Scores (images × classes) and labels."""


def measure_baseline(
    baseline: Baseline, points: Sequence[str], experiment: Experiment, seeds: Sequence[int]
) -> Measured:
    measured = Measured({point: [] for point in points})
    seconds: list[float] = []
    for seed in seeds if baseline.seeded else seeds[:1]:
        scored: dict[str, list[Scored]] = {point: [] for point in points}
        took = 0.0
        both: list[Accuracies] = []
        for step, scorer, spent in _steps(baseline, experiment, seed):
            took += spent
            space = experiment.space(step)
            dev, test = (_scores(experiment, scorer, half, step) for half in experiment.halves(step))
            for point, result in _points(dev, test, space, baseline.dial):
                scored[point].append(result)
            if baseline.dial and seed == seeds[0] and experiment.steps == 1:
                measured.curve = curve(dial_frontier(own_columns(test[0], space), test[1], space), ("b",))
            answers, labels = (np.concatenate(x) for x in zip(*((z.argmax(1), y) for z, y in (dev, test)), strict=True))
            both.append(accuracies(answers, labels, space))
        for point, results in scored.items():
            measured.points[point].append(results)
        measured.both.append(both)
        seconds.append(took)
        measured.parameters = _without_heads(scorer)
    measured.seconds = {"train": float(np.median(seconds))}
    return measured


def _steps(baseline: Baseline, experiment: Experiment, seed: int) -> Iterator[tuple[int, nn.Module, float]]:
    """The scorer after each step, or after the last only if it does not depend on earlier ones; and its seconds."""
    before: nn.Module = experiment.base
    rankings: dict[int, Samples] = {}
    for step in [experiment.steps] if baseline.anew else range(1, experiment.steps + 1):
        task = experiment.task(step, seed, rankings)
        shared = 0.0
        if baseline.on == "features":
            before, stage_one = experiment.branched(step, PAPER.stage_one)
            shared = stage_one[-1]
        start = experiment.now()
        before = baseline.learn(before, task).to(experiment.device)
        yield step, before, shared + experiment.now() - start
        if experiment.plan.memory == "herding" and step < experiment.steps:
            features = _own_features(before, experiment.images(experiment.training_images(step)))
            if features is not None:
                rankings[step] = experiment.ranked(step, features)


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


def _scores(experiment: Experiment, scorer: nn.Module, half: Samples, step: int) -> Half:
    if isinstance(scorer, OnFeatures):
        features = experiment.features(scorer.model, half)[0]
        with torch.no_grad():
            scores = scorer.head.eval()(features)
    else:
        scores = scores_of(scorer, experiment.images(half))
    return scores.double().cpu().numpy(), experiment.labels(half, step)


def _points(dev: Half, test: Half, space: LabelSpace, dial: bool) -> Iterator[tuple[str, Scored]]:
    """The predictions as they are, and with the dial."""
    folds = [accuracies(scores.argmax(1), labels, space) for scores, labels in (test, dev)]
    yield "plain", Scored.of("plain", (), folds)
    if dial:
        columns = [(own_columns(scores, space), labels) for scores, labels in (dev, test)]
        for goal, scored in score_dial(columns[0], columns[1], space, PAPER_GOALS).items():
            yield f"dial-{goal}", replace(scored, goal=f"dial-{goal}")


def _without_heads(scorer: nn.Module) -> int:
    """Parameters without heads, and the numbers a method stores beside its parameters."""
    parameters = sum(
        parameter.numel()
        for name, parameter in scorer.named_parameters()
        if not {"head", "heads"} & set(name.split("."))
    )
    return parameters + _stored(scorer)


def _stored(scorer: nn.Module) -> int:
    """How many numbers a method stores beside its parameters, where it or its head says so."""
    for part in (scorer, getattr(scorer, "head", None)):
        stored = getattr(part, "stored", None)
        if stored is not None:
            return int(stored())
    return 0
