"""The base model alone. It never learns the new classes, so whatever it is shown gets a name it already knew.

Source: the row "pre-trained model" of the paper's table on full overlap (Wu et al., CVPR 2022). No departure.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from branchout.baselines.task import Baseline, Task
from branchout.model.classifier import Classifier


class Padded(nn.Module):
    """The base's logits; classes that it does not know come below its least one."""

    def __init__(self, model: Classifier, classes: int) -> None:
        super().__init__()
        self.model = model
        self.unknown = classes - len(model.space.classes)

    def forward(self, pictures: Tensor) -> Tensor:
        z = self.model(pictures)
        below = z.amin(1, keepdim=True) - 1
        return torch.cat([z, below.expand(-1, self.unknown)], dim=1)


def learn(before: Classifier | Padded, task: Task) -> Padded:
    model = before.model if isinstance(before, Padded) else before
    return Padded(model, len(task.space.classes))


BASELINES = (
    Baseline(
        "pretrained",
        "pre-trained model",
        learn,
        on="base",
        dial=False,
        seeded=False,
        note="knows the base's classes only",
    ),
)
