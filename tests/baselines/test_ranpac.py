"""RanPAC: its normal equations, its ridge, its sums over steps."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from branchout.baselines import ranpac
from branchout.baselines.class_features import new_groups, plain
from branchout.baselines.task import Task
from branchout.model.classifier import Classifier


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranpac, "WIDTH", 60)


def random_groups(seed: int = 0) -> list[torch.Tensor]:
    """Four classes of very different sizes, far enough apart to be told, near enough to be confused."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    return [
        centre + torch.randn(n, 30, generator=generator, dtype=torch.float64)
        for centre, n in zip(centres, (40, 5, 11, 2), strict=True)
    ]


def sums(groups: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    gram, moments = torch.zeros(30, 30).double(), torch.zeros(30, 4).double()
    ranpac.add(gram, moments, groups, range(4), lambda x: x)
    return gram, moments


@pytest.mark.parametrize("at_a_time", [1, 50, 1000])
def test_sums_are_means_over_each_group(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranpac, "TOGETHER", at_a_time)
    groups = random_groups()
    gram, moments = sums(groups)
    slow = sum(torch.outer(x, x) / len(group) for group in groups for x in group)
    assert torch.allclose(gram, slow)
    for number, group in enumerate(groups):
        assert torch.allclose(moments[:, number], sum(group) / len(group))


def test_a_group_weighs_the_same_however_often_its_images_come() -> None:
    groups = random_groups()
    often = [groups[0].repeat(7, 1), *groups[1:]]
    for one, other in zip(sums(groups), sums(often), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("width", [30, 200])  # fewer than there are images, and more
@pytest.mark.parametrize("at_a_time", [1, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_ridge_is_that_of_a_slow_search(
    seed: int, width: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranpac, "TOGETHER", at_a_time)
    torch.manual_seed(seed)
    groups, branches = [group + 2 * torch.randn_like(group) for group in random_groups(seed)], [0, 0, 0, 1]
    projection = torch.randn(30, width).double()

    def lift(x: torch.Tensor) -> torch.Tensor:
        return x if width == 30 else F.relu(x @ projection)

    found = ranpac.best_ridge(groups, range(4), branches, 4, lift, seed)
    parts = [ranpac.held_out(group, ranpac.seed_for(seed, place)) for place, group in enumerate(groups)]
    gram, moments = torch.zeros(width, width).double(), torch.zeros(width, 4).double()
    for number, (fitted, _) in enumerate(parts):
        for x in lift(fitted):
            gram += torch.outer(x, x) / len(fitted)
            moments[:, number] += x / len(fitted)
    scores = []
    for ridge in ranpac.RIDGES:
        weight = torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(width), moments)
        right = [[int((lift(x) @ weight).argmax()) == n for x in kept] for n, (_, kept) in enumerate(parts)]
        each = [sum(group) / len(group) for group in right]
        scores.append((sum(each[:3]) / 3 + each[3]) / 2)  # the one new class counts as much as the three old ones
    best = [ridge for ridge, score in zip(ranpac.RIDGES, scores, strict=True) if score >= max(scores) - 1e-9]
    assert found == max(best)
    assert len(set(scores)) > 1


def test_later_steps_keep_the_ridge_of_the_first(
    classifier: Classifier, task: Task, next_task: Callable[[Task], Task]
) -> None:
    first = ranpac.learn(classifier, task)
    assert ranpac.learn(first, next_task(task)).head.ridge == first.head.ridge


def test_a_fifth_is_held_out_and_nothing_is_in_both_parts() -> None:
    group = torch.arange(20.0)[:, None]
    fitted, kept = ranpac.held_out(group, 0)
    assert (len(fitted), len(kept)) == (16, 4)
    assert sorted([*fitted.flatten().tolist(), *kept.flatten().tolist()]) == group.flatten().tolist()
    assert [len(part) for part in ranpac.held_out(group[:2], 0)] == [1, 1]
    assert [len(part) for part in ranpac.held_out(group[:1], 0)] == [1, 0]


def test_two_steps_sum_to_what_one_look_at_all_would(
    classifier: Classifier, overlapping_task: Task, next_task: Callable[[Task], Task]
) -> None:
    later = next_task(overlapping_task)
    first = ranpac.learn(classifier, overlapping_task)
    second = ranpac.learn(first, later)
    projection = second.head.projection
    assert torch.equal(projection, first.head.projection)
    describe = plain(classifier, later)
    groups = [
        *new_groups(overlapping_task, describe, first=True),
        *new_groups(later, describe, first=False),
    ]
    gram, moments = torch.zeros(60, 60).double(), torch.zeros(60, len(later.space.classes)).double()
    numbers = later.space.class_of_column.tolist()
    ranpac.add(gram, moments, groups, numbers, lambda group: F.relu(group @ projection).double())
    assert torch.allclose(second.head.gram, gram)
    assert torch.allclose(second.head.moments, moments)


def test_the_classifier_solves_its_equations_with_a_ridge_of_the_list(classifier: Classifier, task: Task) -> None:
    head = ranpac.learn(classifier, task).head
    weight = head.weight.double()
    residual = head.moments - head.gram @ weight
    ridge = float((residual * weight).sum() / (weight**2).sum() / head.gram.diagonal().mean())
    assert torch.allclose(residual, ridge * head.gram.diagonal().mean() * weight, rtol=1e-2, atol=1e-4)
    assert min(abs(ridge / value - 1) for value in ranpac.RIDGES) < 0.05


def test_what_it_takes_to_answer_is_the_projection_and_the_classifier(classifier: Classifier, task: Task) -> None:
    head = ranpac.learn(classifier, task).head
    features = torch.rand(3, 1, classifier.backbone.features)
    scores = head(features)
    assert head.stored() == classifier.backbone.features * 60 + 60 * 16
    head.gram.fill_(torch.nan)
    head.moments.fill_(torch.nan)
    assert torch.equal(head(features), scores)
