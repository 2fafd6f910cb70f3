"""What methods that train a whole network share, and that all of them can take every kind of step."""

from dataclasses import replace

import pytest
import torch
from helpers import same, snapshot

from branchout.baselines import whole_network
from branchout.baselines.networks import scores_of
from branchout.baselines.registry import baselines
from branchout.data.samples import Samples
from branchout.training.optimisation import Optimisation

NETWORKS = ("finetune", "finetune-exemplars", "lwf", "icarl", "bic", "wa", "der", "podnet", "rainbow")
ON_FEATURES = ("fa-bic", "fa-wa")


@pytest.mark.parametrize("name", [*NETWORKS, *ON_FEATURES])
def test_two_steps_with_overlap(name, classifier, overlapping_task, next_task, branched, old_test: Samples) -> None:
    before = snapshot(classifier)
    method = baselines()[name]
    first = replace(overlapping_task, network=Optimisation(epochs=1, lr=0.05, batch=32), views=1)
    scorer = classifier
    for task in (first, next_task(first)):
        scorer = method.learn(branched(task) if method.on == "features" else scorer, task)
        scores = scores_of(scorer, task.images(old_test))
        assert scores.shape == (len(old_test), len(task.space.classes))
        assert scores.isfinite().all()
    assert same(before, snapshot(classifier))


@pytest.mark.parametrize("name", NETWORKS)
def test_linear_head(name, linear_classifier, task, old_test: Samples) -> None:
    few = task.new.select(torch.arange(0, len(task.new), 2).numpy())
    task = replace(task, new=few, network=Optimisation(epochs=1, lr=0.05, batch=32), views=1)
    scores = scores_of(baselines()[name].learn(linear_classifier, task), task.images(old_test))
    assert scores.shape == (len(old_test), 16)
    assert scores.isfinite().all()


def test_student_starts_where_the_teacher_is(classifier, task, old_test: Samples) -> None:
    student, teacher = whole_network.student_and_teacher(classifier, task)
    images = task.images(old_test)
    assert torch.equal(scores_of(student, images)[:, :12], scores_of(teacher, images))
    assert all(p.requires_grad for p in student.parameters())
    assert not any(p.requires_grad for p in teacher.parameters())


def test_distillation_against_a_loop() -> None:
    student, teacher = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    total = 0.0
    for z, t in zip(student, teacher, strict=True):
        p, q = (z / 2).exp() / (z / 2).exp().sum(), (t / 2).exp() / (t / 2).exp().sum()
        total += sum(float(q[c] * (q[c] / p[c]).log()) for c in range(4))
    assert whole_network.distillation(student, teacher).item() == pytest.approx(total / 3)


def test_distillation_leaves_a_student_like_its_teacher_alone() -> None:
    student = torch.randn(5, 7, requires_grad=True)
    loss = whole_network.distillation(student, student.detach() + 3)  # a shift of all logits says nothing
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert student.grad.abs().max() < 1e-6
    assert whole_network.distillation(student, torch.randn(5, 7)).item() > 0.01


def test_share_of_known_classes(task, overlapping_task) -> None:
    assert whole_network.old_share(task) == pytest.approx(12 / 16)
    assert whole_network.old_share(overlapping_task) == pytest.approx(12 / 18)
    assert whole_network.in_step(overlapping_task).sum() == 6


def test_views_are_augmented_and_plain_pictures_are_not(task, old_test: Samples) -> None:
    few = old_test.select(torch.arange(4).numpy())
    views = whole_network.augmented_outputs(lambda pictures: pictures, task, few)
    plain = whole_network.plain_outputs(lambda pictures: pictures, task, few)
    assert views.shape == (task.views, *plain.shape)
    assert not torch.equal(views[0], views[1])
    assert torch.equal(plain, next(iter(task.images(few).plain([torch.arange(4).numpy()]))))
