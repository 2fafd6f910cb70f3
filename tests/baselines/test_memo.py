"""MEMO: its loss against a plain formula, shared early blocks that never change, one head on all features."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import same, snapshot

from branchout.baselines import memo, whole_network
from branchout.training.optimisation import Optimisation


@pytest.fixture(scope="module")
def learned(classifier, task) -> memo.SharedEarly:
    return memo.learn(classifier, task)


def test_the_loss_is_its_formula_image_by_image() -> None:
    torch.manual_seed(0)
    z, auxiliary = torch.randn(4, 5), torch.randn(4, 3)
    target, answers = torch.tensor([0, 4, 2, 3]), torch.tensor([0, 0, 0, 1, 2])
    total = 0.0
    for n, y in enumerate(target.tolist()):
        for row, right in ((z[n], y), (auxiliary[n], {3: 1, 4: 2}.get(y, 0))):
            total -= math.log(math.exp(row[right]) / sum(math.exp(value) for value in row))
    assert whole_network.with_auxiliary(z, auxiliary, target, answers).item() == pytest.approx(total / 4, rel=1e-5)


def test_the_auxiliary_head_has_one_answer_for_each_class_of_the_step(overlapping_task) -> None:
    answers = whole_network.new_or_other(overlapping_task).tolist()
    names = overlapping_task.space.branches[-1]
    for number, name in enumerate(overlapping_task.space.classes):
        assert answers[number] == (1 + names.index(name) if name in names else 0)


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.8
    assert accuracy_of(learned, task, old_test) > 0.8


def test_early_blocks_and_earlier_late_ones_are_shared_and_never_change(classifier, learned, task, next_task) -> None:
    assert same(snapshot(learned.backbone), snapshot(classifier.backbone))
    held = snapshot(learned)
    short = replace(next_task(task), network=Optimisation(epochs=1, lr=0.05, batch=32))
    second = memo.learn(learned, short)
    assert same(held, snapshot(learned))
    assert len(second.blocks) == 2
    assert same(snapshot(second.blocks[0]), snapshot(learned.blocks[0]))
    assert not same(snapshot(second.blocks[1]), snapshot(learned.blocks[0]))
    assert second.head.weight.shape == (19, 3 * classifier.backbone.features)


def test_features_are_those_of_all_late_blocks_side_by_side(learned, task, new_test) -> None:
    together = whole_network.plain_outputs(learned.features, task, new_test)
    own = whole_network.plain_outputs(learned.backbone, task, new_test)
    torch.testing.assert_close(together[:, : own.shape[1]], 16 * own / own.norm(dim=1, keepdim=True))
    trunk = whole_network.plain_outputs(lambda x: learned.backbone.run(x, 0, learned.start), task, new_test)
    late = learned.blocks[0](trunk)
    torch.testing.assert_close(
        together[:, own.shape[1] :], 16 * late / late.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-4
    )


def test_new_rows_are_as_long_as_old_ones_at_the_end(learned, classifier) -> None:
    lengths, known = learned.head.weight.norm(dim=1), len(classifier.space.classes)
    assert lengths[known:].mean().item() == pytest.approx(lengths[:known].mean().item(), rel=1e-5)


def test_a_second_step_with_an_overlapping_class(learned, task, next_task, accuracy_of, old_test, later_test) -> None:
    task = next_task(task)
    second = memo.learn(learned, task)
    assert accuracy_of(second, task, later_test) > 0.6
    assert accuracy_of(second, task, old_test) > 0.6


def test_a_linear_head_is_a_base_too(linear_classifier, task, accuracy_of, old_test, new_test) -> None:
    scorer = memo.learn(linear_classifier, task)
    assert accuracy_of(scorer, task, new_test) > 0.75
    assert accuracy_of(scorer, task, old_test) > 0.6
