"""MEMO: early blocks are shared by all steps, late ones are added for every step, and one head reads the features of
all of them. An auxiliary head on the newest features tells the new classes from each other and from the old.

Source: Zhou, Wang, Ye and Zhan, ICLR 2023; a loss weight of 1, late blocks that start at those of the step before, and
rows of new classes that are aligned in length at the end are from their published experiments. Departures: the shared
blocks are frozen (theirs may be trained further where the base is weak), "late" is the network's last stage, each
block's features are brought to length 16, so that the base's rows start 1 long with the base's logits and lengths can
be aligned (see `wa.LENGTH`), and the schedule is the task's.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.task import Baseline, Task
from branchout.baselines.wa import LENGTH, align
from branchout.model.classifier import Classifier
from branchout.model.staged import Backbone, Branch, branch_point
from branchout.training.loop import precision


class SharedEarly(nn.Module):
    """A frozen backbone, one more copy of its last stage for every step, and one linear head, without bias, on all."""

    def __init__(self, backbone: Backbone, blocks: list[nn.Module], rows: Tensor, classes: int) -> None:
        super().__init__()
        self.backbone, self.start = backbone, branch_point(backbone).start
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear((1 + len(blocks)) * backbone.features, classes, bias=False)
        with torch.no_grad():
            self.head.weight[: len(rows), : rows.shape[1]] = rows

    def features(self, pictures: Tensor) -> Tensor:
        """h_0 ⊕ h_1 ⊕ …, each at length 16."""
        with precision(pictures.device):
            shared = self.backbone.run(self.backbone.arrange(pictures), 0, self.start)
            parts = [self.backbone.run(shared, self.start), *(block(shared) for block in self.blocks)]
        return torch.cat([F.normalize(h.float(), dim=1) * LENGTH for h in parts], dim=1)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures))  # type: ignore[no-any-return]


def learn(before: Classifier | SharedEarly, task: Task) -> SharedEarly:
    feature_heads.seed_step(task)
    network = grown(before, len(task.space.classes))
    network.to(task.device, memory_format=network.backbone.layout(task.device))  # type: ignore[call-overload]
    answers = whole_network.new_or_other(task)
    k = network.backbone.features
    auxiliary = nn.Linear(k, 1 + len(task.space.branches[-1]), bias=False).to(task.device)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        h = network.features(pictures)
        return whole_network.with_auxiliary(network.head(h), auxiliary(h[:, -k:]), target, answers)

    trained = nn.ModuleList([network, auxiliary])
    whole_network.train(trained, task, whole_network.new_and_exemplars(task), loss_of, work="Training new late blocks")
    known = len(task.space.upto(task.step - 1).classes)
    align(network.head, torch.arange(len(task.space.classes), device=task.device) >= known)
    return network.requires_grad_(False)


def grown(before: Classifier | SharedEarly, classes: int) -> SharedEarly:
    """The network with late blocks and rows for one more step; only those blocks and the head are trained."""
    backbone = copy.deepcopy(before.backbone).freeze()
    if isinstance(before, Classifier):
        blocks, rows = [], F.normalize(before.base_head.weight, dim=1)
        fresh: nn.Module = Branch.clone(backbone, branch_point(backbone))
    else:
        blocks, rows = [copy.deepcopy(block).freeze() for block in before.blocks], before.head.weight  # type: ignore[operator]
        fresh = copy.deepcopy(before.blocks[-1]).requires_grad_(True)
        fresh.frozen = False  # type: ignore[assignment]
    return SharedEarly(backbone, [*blocks, fresh], rows, classes)


BASELINES = (Baseline("memo", "MEMO", learn, on="network"),)
