"""Fine-tuning: the whole network goes on training on the new images, with rows added for the new classes. Nothing
reminds it of the old ones, so it forgets them; with exemplars among the new images it forgets less.

Source: the row "fine-tuning" of the paper's comparison (Wu et al., CVPR 2022); the field's lower bound. The variant
with exemplars is known as experience replay. No departure.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F

from branchout.baselines import whole_network
from branchout.baselines.networks import Network
from branchout.baselines.task import Baseline, Task
from branchout.model.classifier import Classifier


def learn(before: Classifier | Network, task: Task, *, exemplars: bool = False) -> Network:
    network, _ = whole_network.student_and_teacher(before, task)
    samples = whole_network.new_and_exemplars(task) if exemplars else task.new
    whole_network.train(network, task, samples, lambda x, y: F.cross_entropy(network(x), y))
    return network


BASELINES = (
    Baseline("finetune", "fine-tuning", learn, on="network"),
    Baseline("finetune-exemplars", "fine-tuning + exemplars", partial(learn, exemplars=True), on="network"),
)
