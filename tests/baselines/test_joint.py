"""Joint learning sees everything, and answers in the order of the task."""

from dataclasses import replace

import pytest
import torch
from helpers import BASE, fixed_batch, untrained

from branchout.baselines import joint
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model.classifier import Classifier


def test_a_network_trained_on_all_images_answers_in_the_order_of_the_task(task) -> None:
    seen: list[Samples] = []

    def from_scratch(samples: Samples) -> Classifier:
        seen.append(samples)
        return untrained(samples.classes)  # sorted

    task = replace(task, from_scratch=from_scratch)
    model = joint.learn(untrained(BASE), task)
    assert seen == [task.everything]
    assert model.space.classes == task.space.classes != task.everything.classes
    made = untrained(task.everything.classes)
    order = [task.everything.classes.index(name) for name in task.space.classes]
    pictures = fixed_batch()
    with torch.no_grad():
        assert torch.equal(model.eval()(pictures), made.eval()(pictures)[:, order])


def test_without_all_images_it_says_so(task) -> None:
    with pytest.raises(BranchoutError, match="everything"):
        joint.learn(untrained(BASE), replace(task, everything=None, from_scratch=untrained))


def test_networks_of_others_are_not_trained_from_scratch(task) -> None:
    model = untrained(BASE)
    model.arch = {"family": "timm", "name": "convnext_atto", "num_classes": 8}
    with pytest.raises(BranchoutError, match="convnext_atto"):
        joint.learn(model, task)
