"""Nearest class means against means and cosines taken one by one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from branchout.baselines import ncm
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model.classifier import Classifier


def features_of(model: Classifier, task: Task, samples: Samples) -> np.ndarray:
    pictures = next(task.images(samples).plain([np.arange(len(samples))]))
    with torch.no_grad():
        return model.backbone(pictures).numpy()


def directions(groups: list[np.ndarray]) -> list[np.ndarray]:
    """Each mean at length 1, over the share of it that is no noise: in all groups of as many images together."""
    spread = sum(((group - group.mean(0)) ** 2).sum() for group in groups) / sum(len(group) - 1 for group in groups)
    found = []
    for group in groups:
        alike = sum((other.mean(0) ** 2).sum() for other in groups if len(other) == len(group))
        number = sum(len(other) == len(group) for other in groups)
        share = max(1 - number * spread / len(group) / alike, 0.1)
        found.append(group.mean(0) / np.linalg.norm(group.mean(0)) / np.sqrt(share))
    return found


def test_scores_are_products_with_the_nearest_mean_of_a_class(
    classifier: Classifier, overlapping_task: Task, new_look_test: Samples
) -> None:
    task = overlapping_task
    scores = scores_of(ncm.learn(classifier, task), task.images(new_look_test)).numpy()
    tables = [(name, samples) for samples in (task.memory, task.new) for name in samples.classes]
    groups = [features_of(classifier, task, samples.of_classes([name])) for name, samples in tables]
    means: dict[str, list[np.ndarray]] = {}
    for (name, _), mean in zip(tables, directions(groups), strict=True):
        means.setdefault(name, []).append(mean)
    for h, score in zip(features_of(classifier, task, new_look_test), scores, strict=True):
        expected = [max(16 * h @ mean / np.linalg.norm(h) for mean in means[name]) for name in task.space.classes]
        assert score == pytest.approx(np.array(expected), abs=1e-3)


def test_classes_of_few_images_score_as_high_as_those_of_many() -> None:
    """Cosines to plain means of five images are lower by their noise; these products are not."""
    generator = torch.Generator().manual_seed(0)
    centre = 3 * torch.nn.functional.normalize(torch.randn(200, generator=generator), dim=0)
    few = [centre + 0.3 * torch.randn(5, 200, generator=generator) for _ in range(200)]
    many = [centre + 0.3 * torch.randn(500, 200, generator=generator) for _ in range(3)]
    h = torch.nn.functional.normalize(centre, dim=0)
    scores = ncm.class_means([*few, *many]) @ h
    assert scores[:200].mean().item() == pytest.approx(scores[200:].mean().item(), rel=0.01)
    plain = torch.stack([torch.cosine_similarity(group.mean(0), h, dim=0) for group in (*few, *many)])
    assert plain[:200].mean() < 0.87 < 0.99 < plain[200:].mean()


def test_earlier_means_stay_and_later_ones_join(
    classifier: Classifier, task: Task, next_task: Callable[[Task], Task]
) -> None:
    first = ncm.learn(classifier, task)
    later = next_task(task)
    second = ncm.learn(first, later)
    known = len(first.head.means)
    assert torch.equal(second.head.means[:known], first.head.means)
    assert len(second.head.means) == later.space.columns
    mean = features_of(classifier, later, later.new.of_classes([later.space.branches[2][0]])).mean(0)
    assert torch.cosine_similarity(second.head.means[known], torch.from_numpy(mean), dim=0) > 1 - 1e-5


def test_all_images_give_other_means_of_the_base(classifier: Classifier, task: Task) -> None:
    few, all_ = ncm.learn(classifier, task), ncm.learn(classifier, task, everything=True)
    old = task.everything.select(task.everything.origin == 0).of_classes(task.space.classes[:1])
    mean = torch.from_numpy(features_of(classifier, task, old).mean(0))
    assert torch.cosine_similarity(all_.head.means[0], mean, dim=0) > 1 - 1e-5
    assert torch.cosine_similarity(few.head.means[0], mean, dim=0) < 1 - 1e-4


def test_a_class_without_exemplars_is_named(classifier: Classifier, task: Task) -> None:
    poor = replace(task, memory=task.memory.of_classes(task.space.branches[0][1:]))
    with pytest.raises(BranchoutError, match="the base knows 'ampersand', but no image"):
        ncm.learn(classifier, poor)


def test_what_it_takes_to_answer_is_one_mean_a_column(classifier: Classifier, overlapping_task: Task) -> None:
    head = ncm.learn(classifier, overlapping_task).head
    assert head.stored() == (12 + 6) * classifier.backbone.features
