"""BiC moves new classes' logits by one scale and one shift, fitted on balanced images that trained nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.baselines import bic, whole_network
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Task
from branchout.data.memory import keep


@pytest.fixture(scope="module")
def learned(classifier, task) -> bic.BiasCorrected:
    return bic.learn(classifier, replace(task, network=replace(task.network, epochs=4)))


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.8
    assert accuracy_of(learned, task, old_test) > 0.8


def test_nothing_but_scale_and_shift_of_new_logits(learned, task, new_test) -> None:
    images = task.images(new_test)
    raw, corrected = scores_of(learned.network, images), scores_of(learned, images)
    assert torch.equal(raw[:, :12], corrected[:, :12])
    alpha, beta = learned.scale[12].item(), learned.shift[12].item()
    assert (alpha, beta) != (1.0, 0.0)
    assert torch.allclose(corrected[:, 12:], alpha * raw[:, 12:] + beta)


def test_held_out_images_are_balanced_and_train_nothing(task, overlapping_task) -> None:
    for each in (replace(task, per_class=20), overlapping_task):
        training, held = bic.hold_out(each)
        assert not set(training.ids) & set(held.ids)
        assert len(training) + len(held) == len(each.new) + len(each.memory)
        groups, counts = np.unique(np.stack([held.labels, held.origin]), axis=1, return_counts=True)
        assert set(counts) == {2 if each.per_class == 20 else 1}
        assert groups.shape[1] == 12 + len(each.new.classes)


def test_single_exemplars_train_and_are_asked_too(task) -> None:
    task = replace(task, memory=keep(task.memory, per_class=1))
    training, held = bic.hold_out(task)
    assert set(task.memory.ids) <= set(training.ids) & set(held.ids)


def test_without_exemplars_there_is_no_bias_to_fit(task) -> None:
    task = replace(task, memory=task.memory.select(np.zeros(len(task.memory), dtype=bool)))
    training, held = bic.hold_out(task)
    assert (len(training), len(held)) == (len(task.new), 0)


def _problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy logits whose last three columns are too loud."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (300,), generator=generator)
    logits = 2 * torch.randn(300, 7, generator=generator) + 2 * F.one_hot(labels, 7)
    logits[:, 4:] = logits[:, 4:] * 2 + 3
    return logits.double(), labels, torch.tensor([0] * 4 + [1] * 3)


def test_fitted_bias_is_the_best_of_a_fine_grid() -> None:
    logits, labels, group = _problem()
    (alpha,), (beta,) = bic.fit_biases(logits, labels, group)

    def loss(a: float, b: float) -> float:
        moved = torch.cat([logits[:, :4], a * logits[:, 4:] + b], dim=1)
        return F.cross_entropy(moved, labels).item() + bic.RIDGE * ((a - 1) ** 2 + b**2)

    grid = {(a, b): loss(a, b) for a in np.arange(0, 1.5, 0.05) for b in np.arange(-4, 1, 0.2)}
    best = min(grid, key=grid.__getitem__)
    assert loss(alpha, beta) <= grid[best]
    assert alpha == pytest.approx(best[0], abs=0.06)
    assert beta == pytest.approx(best[1], abs=0.3)


def test_images_told_apart_perfectly_still_have_an_answer() -> None:
    labels = torch.arange(7).repeat(5)
    (alpha,), (beta,) = bic.fit_biases(20.0 * F.one_hot(labels, 7), labels, torch.tensor([0] * 4 + [1] * 3))
    assert np.isfinite([alpha, beta]).all()
    assert abs(alpha) < 10


def test_second_step_corrects_its_own_classes_only(classifier, task, next_task) -> None:
    quick = replace(task, network=replace(task.network, epochs=1), views=1)
    first = bic.learn(classifier, quick)
    second = bic.learn(first, next_task(quick, again=()))
    assert (first.scale[12:] != 1).all()
    assert (second.scale[:16] == 1).all()
    assert (second.shift[:16] == 0).all()
    assert len(set(second.scale[16:].tolist())) == 1
    assert (second.scale[16:] != 1).all()


def test_teacher_of_the_second_step_is_corrected_and_its_student_is_not(
    classifier, task, next_task, monkeypatch, new_test
) -> None:
    quick = replace(task, network=replace(task.network, epochs=1), views=1)
    first = bic.learn(classifier, quick)
    pairs: list[tuple[torch.nn.Module, torch.nn.Module]] = []

    def noted(student: torch.nn.Module, teacher: torch.nn.Module, of: Task) -> whole_network.Loss:
        pairs.append((student, teacher))
        return distillation_loss(student, teacher, of)

    distillation_loss = whole_network.distillation_loss
    monkeypatch.setattr(whole_network, "distillation_loss", noted)
    second = bic.learn(first, next_task(quick, again=()))
    ((student, teacher),) = pairs
    images = quick.images(new_test)
    assert torch.equal(scores_of(teacher, images), scores_of(first, images))
    assert student is second.network


def test_on_features_only_new_branches_move(branched, task, accuracy_of, old_test, new_test) -> None:
    model = branched(task)
    scorer = bic.learn_on_features(model, task)
    assert accuracy_of(scorer, task, new_test) > 0.7
    assert accuracy_of(scorer, task, old_test) > 0.9
    images = task.images(new_test)
    raw, corrected = scores_of(model, images), scores_of(scorer, images)
    assert torch.allclose(raw[:, :12], corrected[:, :12])
    alpha, beta = scorer.head.scale[12], scorer.head.shift[12]
    assert torch.allclose(corrected[:, 12:], alpha * raw[:, 12:] + beta, atol=1e-5)
    assert alpha != 1


def test_on_features_each_branch_has_its_own(branched, overlapping_task, next_task) -> None:
    task = replace(next_task(overlapping_task), views=1)
    head = bic.learn_on_features(branched(task), task).head
    widths = [len(names) for names in task.space.branches]
    parts = torch.split(head.scale, widths)
    assert [len(set(part.tolist())) for part in parts] == [1, 1, 1]
    assert parts[0][0] == 1
    assert parts[1][0] != parts[2][0]
