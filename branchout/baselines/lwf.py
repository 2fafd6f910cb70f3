"""LwF, learning without forgetting: no old image is kept, but on the new ones the old classes' logits are held where
the old network had them. Classes of the step are learned among themselves, as LwF learns a new task's own head.

Source: Li and Hoiem, ECCV 2016; λ_o = 1 and temperature 2 are theirs. Departures: all heads answer together, which is
how LwF is read in class-incremental learning; there is no warm-up of the new head alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.baselines import whole
from branchout.baselines.common import Network, Task
from branchout.baselines.registry import Baseline
from branchout.model.classifier import Classifier

LAMBDA = 1.0
"""λ_o: weight of the old classes' loss."""


def learn(before: Classifier | Network, task: Task) -> Network:
    network, teacher = whole.student_and_teacher(before, task)
    known = len(teacher.head.weight)
    classes = whole.taught(task)
    place = whole.place_among_taught(task)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, target = batch
        with torch.no_grad():
            remembered = teacher(pictures)
        z = network(pictures)
        new = F.cross_entropy(z[:, classes], place[target])
        return new + LAMBDA * whole.distillation(z[:, :known], remembered)

    whole.train(network, task, task.labelled(task.new), loss_of)
    return network


BASELINES = (Baseline("lwf", "LwF", learn, on="network"),)
