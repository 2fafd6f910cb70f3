"""Fine-tuning: the whole network goes on training on the new images, with rows added for the new classes. Nothing
reminds it of the old ones, so it forgets them; with exemplars among the new images it forgets less.

Source: the row "fine-tuning" of the paper's comparison (Wu et al., CVPR 2022); the field's lower bound. The variant
with exemplars is known as experience replay. No departure.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from branchout.baselines import whole_network
from branchout.baselines.networks import Network
from branchout.baselines.registry import Baseline
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.model.classifier import Classifier


def learn(before: Classifier | Network, task: Task) -> Network:
    return _trained_on(before, task, task.new)


def learn_with_exemplars(before: Classifier | Network, task: Task) -> Network:
    return _trained_on(before, task, whole_network.new_and_exemplars(task))


def _trained_on(before: Classifier | Network, task: Task, samples: Samples) -> Network:
    network, _ = whole_network.student_and_teacher(before, task)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, target = batch
        return F.cross_entropy(network(pictures), target)

    whole_network.train(network, task, samples, loss_of)
    return network


BASELINES = (
    Baseline("finetune", "fine-tuning", learn, on="network"),
    Baseline("finetune-exemplars", "fine-tuning + exemplars", learn_with_exemplars, on="network"),
)
