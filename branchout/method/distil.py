"""Distillation of several step branches into fewer: the old model as a teacher, the new branches and their loss.

Symbols: h(x; Φ_s) → `x` · z_b → `z_base` · logits of the model to compact, over all classes → `taught`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from branchout.labels import LabelSpace
from branchout.method.frozen import Frozen
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import Pooler, new_head
from branchout.model.staged import Branch, branch_point
from branchout.training.loop import precision
from branchout.training.losses import softened_kl

TEMPERATURE = 2.0


class Teacher(Frozen):
    """The model to compact: what enters the new branches, the base's logits, and its own over all classes."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[Tensor]:
        x, features = self.run(images)
        return [x, self.model.base_head(features[0]), self.model.fused(features)]


class Student(nn.Module):
    """What compaction trains: the new branches and their heads."""

    biases: Tensor

    def __init__(self, steps: Sequence[Step], space: LabelSpace, pooler: str, biases: Sequence[float]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(step.branch for step in steps)
        self.heads = nn.ModuleList(step.head for step in steps)
        self.pooler = Pooler(space, pooler)
        self.register_buffer("biases", torch.tensor(biases), persistent=False)

    def forward(self, x: Tensor, z_base: Tensor) -> Tensor:
        """Logits over all classes."""
        with precision(x.device):
            features = [branch(x).float() for branch in self.branches]
        z = [head(h) + b for head, h, b in zip(self.heads, features, self.biases, strict=True)]
        return self.pooler(torch.cat([z_base, *z], dim=1))  # type: ignore[no-any-return]

    def trained_parameters(self) -> list[nn.Parameter]:
        own = [parameter for branch in self.branches for parameter in branch.own_parameters()]  # type: ignore[operator]
        return [*own, *self.heads.parameters()]


def compaction_loss(z: Tensor, taught: Tensor) -> Tensor:
    """T²·KL from the model to compact to the new one, over all classes."""
    return TEMPERATURE**2 * softened_kl(taught, z, TEMPERATURE)


def groups_of(steps: int, branches: int) -> list[list[int]]:
    """Numbers of consecutive steps (from 1) that will share a branch, about as many in each group."""
    return [group.tolist() for group in np.array_split(np.arange(1, steps + 1), branches)]


def common_branch_point(base: Classifier, points: Sequence[str]) -> str:
    """Where the new branches start: where all old ones do, or at the earliest stage that any of them clones."""
    if len(set(points)) == 1:
        return points[0]
    start = min(branch_point(base.backbone, where).start for where in points)
    return "fc" if start == len(base.backbone.names) else base.backbone.names[start]


@torch.no_grad()
def merged_step(base: Classifier, steps: Sequence[Step], names: Sequence[str], where: str) -> Step:
    """A branch that starts at the mean of the weights of these steps', and a head with the rows of all of them."""
    point = branch_point(base.backbone, where)
    branch = Branch.clone(base.backbone, point)
    if all(step.where == where for step in steps):
        states = [step.branch.own_state_dict() for step in steps]
        mean = {
            key: torch.stack([state[key].float() for state in states]).mean(0).to(value.dtype)
            for key, value in branch.own_state_dict().items()
        }
        branch.load_state_dict(mean, strict=False)
    head = new_head(base.base_head, len(names))
    rows = {name: (step.head, n) for step in steps for n, name in enumerate(step.names)}
    for number, name in enumerate(names):
        old, row = rows[name]
        for key, parameter in head.named_parameters():
            parameter[number] = old.get_parameter(key)[row]
    return Step(tuple(names), where, point.start, branch, head)
