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


def mean_of(model: Classifier, task: Task, samples: Samples, name: str) -> np.ndarray:
    return features_of(model, task, samples.of_classes([name])).mean(0)


def test_scores_are_cosines_to_the_nearest_mean_of_a_class(
    classifier: Classifier, overlapping_task: Task, new_look_test: Samples
) -> None:
    task = overlapping_task
    scores = scores_of(ncm.learn(classifier, task), task.images(new_look_test)).numpy()
    means: dict[str, list[np.ndarray]] = {}
    for samples in (task.memory, task.new):
        for name in samples.classes:
            means.setdefault(name, []).append(mean_of(classifier, task, samples, name))
    for h, score in zip(features_of(classifier, task, new_look_test), scores, strict=True):
        cosines = [
            max(16 * h @ mean / np.linalg.norm(h) / np.linalg.norm(mean) for mean in means[name])
            for name in task.space.classes
        ]
        assert score == pytest.approx(np.array(cosines), abs=1e-3)


def test_earlier_means_stay_and_later_ones_join(
    classifier: Classifier, task: Task, next_task: Callable[[Task], Task]
) -> None:
    first = ncm.learn(classifier, task)
    later = next_task(task)
    second = ncm.learn(first, later)
    known = len(first.head.means)
    assert torch.equal(second.head.means[:known], first.head.means)
    assert len(second.head.means) == later.space.columns
    name = later.space.branches[2][0]
    assert second.head.means[known].numpy() == pytest.approx(mean_of(classifier, later, later.new, name), abs=1e-4)


def test_all_images_give_other_means_of_the_base(classifier: Classifier, task: Task) -> None:
    few, all_ = ncm.learn(classifier, task), ncm.learn(classifier, task, everything=True)
    name = task.space.classes[0]
    old = task.everything.select(task.everything.origin == 0)
    assert all_.head.means[0].numpy() == pytest.approx(mean_of(classifier, task, old, name), abs=1e-4)
    assert not torch.allclose(few.head.means[0], all_.head.means[0])
    assert torch.allclose(few.head.means[-1], all_.head.means[-1])


def test_a_class_without_exemplars_is_named(classifier: Classifier, task: Task) -> None:
    poor = replace(task, memory=task.memory.of_classes(task.space.branches[0][1:]))
    with pytest.raises(BranchoutError, match="the base knows 'ampersand', but no image"):
        ncm.learn(classifier, poor)


def test_what_it_takes_to_answer_is_one_mean_a_column(classifier: Classifier, overlapping_task: Task) -> None:
    head = ncm.learn(classifier, overlapping_task).head
    assert head.stored() == (12 + 6) * classifier.backbone.features
