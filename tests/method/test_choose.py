"""Held-out images choose and measure: each half is measured at the point that the other half chooses."""

import numpy as np
import pytest
import torch
from helpers import BASE, LATER, NEW, untrained
from torch import nn

from branchout.method.choose import choose_point, cross_fit, dial_curve
from branchout.method.dial import balanced_without_old, dial_frontier, newest_bias, predict, with_bias
from branchout.method.features import logit_columns
from branchout.method.recipes import BRANCHOUT
from branchout.metrics import accuracies
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import Branch, branch_point


def test_each_half_is_measured_at_the_other_halfs_choice() -> None:
    model = untrained(BASE, NEW)
    torch.manual_seed(2)
    features = torch.rand(60, 2, model.backbone.features)
    labels = np.random.default_rng(2).integers(0, len(model.space.classes), 60)
    halves = ((features[:30], labels[:30]), (features[30:], labels[30:]))
    points, frontier = choose_point(model, None, features, labels, recipe=BRANCHOUT, goal="avg", chosen_on="held-out")
    found = cross_fit(model, halves, points, frontier, None)
    answers = []
    for here, there in ((halves[1], halves[0]), (halves[0], halves[1])):
        curve = dial_frontier(logit_columns(model, here[0]), here[1], model.space, by_class=True)
        b = float(curve.settings[curve.choose("avg"), 0])
        answers.append(predict(logit_columns(model, there[0]), model.space, b))
    expected = accuracies(np.concatenate(answers), labels, model.space)
    assert found.after == expected
    assert found.goals["avg"].test == expected
    assert found.images == 60
    assert frontier.choose("avg") == points.point  # the saved points keep the one that was chosen


def test_a_cautious_choice_stays_among_the_saved_points() -> None:
    model = untrained(BASE, NEW)
    torch.manual_seed(4)
    features = torch.rand(80, 2, model.backbone.features)
    labels = np.random.default_rng(4).integers(0, len(model.space.classes), 80)
    whole = dial_frontier(logit_columns(model, features), labels, model.space, by_class=True)
    points, frontier = choose_point(
        model, None, features, labels, recipe=BRANCHOUT, goal="balanced", chosen_on="held-out"
    )
    wanted = whole.settings[whole.choose("balanced"), 0]
    assert frontier.settings[points.point, 0] == pytest.approx(wanted)


def test_a_half_that_ended_training_chooses_but_measures_nothing() -> None:
    model = untrained(BASE, NEW)
    torch.manual_seed(2)
    features = torch.rand(60, 2, model.backbone.features)
    labels = np.random.default_rng(2).integers(0, len(model.space.classes), 60)
    halves = ((features[:40], labels[:40]), (features[40:], labels[40:]))
    points, frontier = choose_point(model, None, features, labels, recipe=BRANCHOUT, goal="avg", chosen_on="held-out")
    found = cross_fit(model, halves, points, frontier, None, second_only=True)
    curve = dial_frontier(logit_columns(model, features[:40]), labels[:40], model.space, by_class=True)
    b = float(curve.settings[curve.choose("avg"), 0])
    answers = predict(logit_columns(model, features[40:]), model.space, b)
    assert found.after == accuracies(answers, labels[40:], model.space)
    assert found.images == 20


@pytest.mark.parametrize("goal", ["novel", "novel>=0.5"])
def test_a_goal_that_one_half_cannot_judge_does_not_end_a_run(goal: str) -> None:
    """Both halves together reach it; one has no new image, or none that is recognised."""
    model = untrained(BASE, NEW)
    torch.manual_seed(2)
    features = torch.rand(40, 2, model.backbone.features)
    labels = logit_columns(model, features)[:, len(BASE) :].argmax(1) + len(BASE)
    labels[:30] = np.arange(30) % len(BASE)
    if goal == "novel>=0.5":
        features[20] = features[31]
        labels[20] = next(n for n in range(len(BASE), len(BASE) + len(NEW)) if n != labels[31])
    halves = ((features[20:30], labels[20:30]), (features[30:], labels[30:]))
    points, frontier = choose_point(
        model, None, features[20:], labels[20:], recipe=BRANCHOUT, goal=goal, chosen_on="held-out"
    )
    found = cross_fit(model, halves, points, frontier, None)
    assert found.images == 20
    assert found.after.novel is not None


def test_without_old_images_the_newest_step_is_placed_and_earlier_ones_stay() -> None:
    torch.manual_seed(0)
    like = untrained(BASE)
    k, point = like.backbone.features, branch_point(like.backbone, "fc")
    model = Classifier(like.arch, like.backbone, nn.Linear(k, len(BASE)), BASE, like.preprocessing, "glyph")
    for names in (NEW, LATER):
        branch, head = Branch.clone(like.backbone, point), nn.Linear(k, len(names))
        model = model.extended(Step(tuple(names), "fc", point.start, branch, head))
    features = torch.randn(80, 1, k)
    labels = np.random.default_rng(0).choice(model.space.index(LATER), 80)
    points, frontier = choose_point(
        model,
        None,
        features,
        labels,
        recipe=BRANCHOUT,
        goal="balanced",
        chosen_on="pseudo",
        held_new=(features, labels),
        earlier_biases=[-3.0],
    )
    b = balanced_without_old(with_bias(logit_columns(model, features), model.space, [-3.0, 0.0]), labels, model.space)
    assert b is not None
    assert frontier.balanced_at == b
    assert points.biases(2) == pytest.approx([-3.0, b])


def test_held_out_images_place_the_newest_step_and_earlier_ones_stay() -> None:
    model = untrained(BASE, NEW, LATER)
    torch.manual_seed(3)
    features = torch.rand(120, 3, model.backbone.features)
    labels = np.random.default_rng(3).integers(0, len(model.space.classes), 120)
    halves = ((features[:60], labels[:60]), (features[60:], labels[60:]))
    fusion, frontier = choose_point(
        model, None, features, labels, recipe=BRANCHOUT, goal="balanced", chosen_on="held-out", earlier_biases=[-1.5]
    )
    b = newest_bias(logit_columns(model, features), labels, model.space, [-1.5])
    assert frontier.balanced_at == b
    assert fusion.biases(2) == pytest.approx([-1.5, b])
    found = cross_fit(model, halves, fusion, frontier, None, earlier_biases=[-1.5])
    answers = []
    for here, there in ((halves[1], halves[0]), (halves[0], halves[1])):
        columns = logit_columns(model, here[0])
        b = newest_bias(columns, here[1], model.space, [-1.5])
        answers.append(predict(logit_columns(model, there[0]), model.space, [-1.5, b]))
    assert found.goals["balanced"].test == accuracies(np.concatenate(answers), labels, model.space)


@pytest.mark.parametrize("chosen_on", ["dev", "held-out"])
@pytest.mark.parametrize("seed", range(12))
def test_a_point_for_balanced_that_is_known_stays(seed: int, chosen_on: str) -> None:
    """Also where it is not on the Pareto front of these images: class means are added at that point."""
    model = untrained(BASE, NEW)
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(60, 2, model.backbone.features, generator=generator)
    labels = np.random.default_rng(seed).integers(0, len(model.space.classes), 60)
    columns = logit_columns(model, features)
    b = float(np.median(columns[:, : len(BASE)].max(1) - columns[:, len(BASE) :].max(1))) + 0.01 * seed
    points, _ = choose_point(
        model, None, features, labels, recipe=BRANCHOUT, goal="balanced", chosen_on=chosen_on, earlier_biases=[],
        newest=b,
    )  # fmt: skip
    assert points.biases(1) == pytest.approx([b])


def test_earlier_steps_stay_where_no_image_changes_its_prediction() -> None:
    """The curve has one point then, which would be b = 0."""
    model = untrained(BASE, NEW, LATER)
    columns = logit_columns(model, torch.rand(1, 3, model.backbone.features))
    never = np.array([columns[0, : len(BASE)].argmin()])  # not predicted whatever b is
    curve, offsets = dial_curve(model, columns, never, "mean", True, earlier_biases=[-2.5], b=1.5)
    assert curve.settings.tolist() == [[1.5]]
    assert offsets == (-4.0, 0.0)
