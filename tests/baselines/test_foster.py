"""FOSTER: its losses against plain formulas, a new module beside the frozen network, one network at the end."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import same, snapshot

from branchout.baselines import foster, whole_network
from branchout.baselines.networks import Network, scores_of
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.method.dial import dial_frontier
from branchout.training.optimisation import Optimisation

SHORT = Optimisation(epochs=1, lr=0.02, batch=32)


@pytest.fixture(scope="module")
def learned(classifier, task) -> Network:
    return foster.learn(classifier, replace(task, network=replace(task.network, epochs=4)))


def softmax(z: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in z]
    return [power / sum(powers) for power in powers]


def test_weights_are_inverse_effective_numbers_with_mean_one() -> None:
    counts = np.array([5, 20, 20, 300])
    plain = [(1 - 0.9) / (1 - 0.9**n) for n in counts]
    expected = [weight * len(plain) / sum(plain) for weight in plain]
    assert foster.class_weights(counts, 0.9).tolist() == pytest.approx(expected, rel=1e-5)
    assert foster.class_weights(np.array([0, 3]), 0.9).isfinite().all()  # a class without images


def test_the_boosting_loss_is_its_formula_image_by_image() -> None:
    torch.manual_seed(0)
    z, enhanced, remembered = torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 3)
    target, weights = torch.tensor([0, 4, 2, 3]), torch.tensor([1.5, 1.2, 1.3, 0.5, 0.5])
    total = 0.0
    for n, y in enumerate(target.tolist()):
        total -= math.log(softmax([a / w for a, w in zip(z[n].tolist(), weights.tolist(), strict=True)])[y])
        total -= math.log(softmax(enhanced[n].tolist())[y])
        told, said = softmax(remembered[n].tolist(), 2.0), softmax(z[n, :3].tolist(), 2.0)
        total += sum(p * math.log(p / q) for p, q in zip(told, said, strict=True))
    assert foster.boosting_loss(z, enhanced, remembered, target, weights).item() == pytest.approx(total / 4, rel=1e-5)


def test_balanced_distillation_is_its_formula_image_by_image() -> None:
    torch.manual_seed(1)
    student, teacher, weights = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([2.0, 1.0, 0.5, 0.5])
    total = 0.0
    for n in range(3):
        weighed = [p * w for p, w in zip(softmax(teacher[n].tolist(), 2.0), weights.tolist(), strict=True)]
        said = softmax(student[n].tolist(), 2.0)
        total -= sum(p / sum(weighed) * math.log(q) for p, q in zip(weighed, said, strict=True))
    assert foster.balanced_distillation(student, teacher, weights).item() == pytest.approx(total / 3, rel=1e-5)


def best_average(scorer: Network, task: Task, *tests: Samples) -> float:
    """The best mean accuracy of old and new classes that the dial can reach on these images."""
    scores = np.concatenate([scores_of(scorer, task.images(test)).numpy() for test in tests])
    labels = np.concatenate([task.labels(test) for test in tests])
    return float(dial_frontier(scores[:, task.space.class_of_column], labels, task.space).score("avg").max())


def test_it_learns_and_remembers_in_one_network(learned, task, classifier, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, old_test) > 0.75
    assert best_average(learned, task, old_test, new_test) > 0.85
    count = sum(p.numel() for p in learned.backbone.parameters())
    assert count == sum(p.numel() for p in classifier.backbone.parameters())


@pytest.mark.parametrize("base", ["classifier", "linear_classifier"])
def test_boosting_starts_at_the_old_logits_and_never_touches_the_old_network(base, request, task, old_test) -> None:
    before = request.getfixturevalue(base)
    _, old = whole_network.student_and_teacher(before, task)
    boosted = foster.Boosted(old, len(task.space.classes))
    torch.nn.init.zeros_(boosted.head.weight[:, old.head.weight.shape[1] :].data)
    known = len(before.space.classes)
    expected = scores_of(old, task.images(old_test))
    torch.testing.assert_close(scores_of(boosted, task.images(old_test))[:, :known], expected, rtol=1e-4, atol=1e-4)
    held = snapshot(old)
    trained = foster.boost(old, replace(task, network=SHORT), np.full(len(task.space.classes), 10))
    assert same(held, snapshot(old))
    assert not same(snapshot(trained.fresh), snapshot(old.backbone))


def test_a_second_step_with_an_overlapping_class(learned, task, next_task, old_test, later_test) -> None:
    held = snapshot(learned)
    task = next_task(replace(task, network=replace(task.network, epochs=3)))
    second = foster.learn(learned, task)
    assert same(held, snapshot(learned))
    assert best_average(second, task, old_test, later_test) > 0.75
