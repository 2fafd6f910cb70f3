"""LwF forgets less than fine-tuning without seeing any old image."""

from dataclasses import replace

import numpy as np
import torch

from branchout.baselines import lwf
from branchout.baselines.networks import scores_of
from branchout.training.optimisation import Optimisation


def test_it_learns_and_remembers(classifier, task, accuracy_of, old_test, new_test) -> None:
    network = lwf.learn(classifier, task)
    assert accuracy_of(network, task, new_test) > 0.8
    assert accuracy_of(network, task, old_test) > 0.6  # fine-tuning: below 0.3


def test_it_sees_no_exemplar(classifier, task, new_test) -> None:
    task = replace(task, network=Optimisation(epochs=1, lr=0.05, batch=32))
    none = task.memory.select(np.zeros(len(task.memory), dtype=bool))
    one, other = (lwf.learn(classifier, replace(task, memory=memory)) for memory in (task.memory, none))
    images = task.images(new_test)
    assert torch.equal(scores_of(one, images), scores_of(other, images))
