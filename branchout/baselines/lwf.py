"""LwF, learning without forgetting: no old image is kept, but on the new ones the old classes' logits are held where
the old network had them. Classes of the step are learned among themselves, as LwF learns a new task's own head.

Source: Li and Hoiem, ECCV 2016; λ_o = 1 and temperature 2 are theirs. Departures: all heads answer together, which is
how LwF is read in class-incremental learning; there is no warm-up of the new head alone.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from branchout.baselines import whole_network
from branchout.baselines.networks import Network
from branchout.baselines.task import Baseline, Task
from branchout.model.classifier import Classifier

LAMBDA = 1.0
"""λ_o: weight of the old classes' loss."""


def learn(before: Classifier | Network, task: Task) -> Network:
    network, teacher = whole_network.student_and_teacher(before, task)
    known = len(teacher.head.weight)
    classes = whole_network.step_classes(task)
    place = whole_network.place_in_step(task)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        z = network(pictures)
        new = F.cross_entropy(z[:, classes], place[target])
        return new + LAMBDA * whole_network.distillation(z[:, :known], teacher(pictures))

    whole_network.train(network, task, task.new, loss_of)
    return network


BASELINES = (Baseline("lwf", "LwF", learn, on="network"),)
