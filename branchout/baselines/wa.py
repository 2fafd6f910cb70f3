"""WA, weight aligning: distillation and exemplars keep the network, but the new classes' rows of the head grow longer
than the old ones'; so at the end they are shortened by one factor γ until both are equally long on average. FA+WA
multiplies the logits of the paper's new branch by the γ of its head.

Source: Zhao et al., CVPR 2020; λ = old/(old + new) and temperature 2 are theirs. FA+WA: the paper's section 5.2 (Wu et
al., CVPR 2022). Departures: lengths must count, so a base's cosine head goes on as linear rows without bias that read
the same normalised features and start where they give the same logits; and rows are not clipped at zero, where a base's
are not. In FA+WA, where a cosine head ignores the length of its rows, γ is still the ratio of the rows' lengths as they
are stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import whole
from branchout.baselines.branches import with_scales
from branchout.baselines.common import Network, OnFeatures, Task
from branchout.baselines.registry import Method
from branchout.model.classifier import Classifier
from branchout.model.fusion import CosineHead, Head, to_norm


class Rows(nn.Linear):
    """Linear rows without bias, whose lengths count; features come at length 4 if the base's head had them so."""

    def __init__(self, features: int, classes: int, normalised: bool) -> None:
        super().__init__(features, classes, bias=False)
        self.normalised = normalised

    @classmethod
    def continuing(cls, head: Head, classes: int) -> Rows:
        """Rows that give the logits of `head`, but for a bias, and short random ones for more classes."""
        cosine = isinstance(head, CosineHead)
        rows = cls(head.weight.shape[1], classes, cosine or (isinstance(head, Rows) and head.normalised))
        rows.to(head.weight.device)
        with torch.no_grad():
            rows.weight[: len(head.weight)] = to_norm(head.weight) if cosine else head.weight
        return rows

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(to_norm(h) if self.normalised else h)


def learn(before: Classifier | Network, task: Task) -> Network:
    network, teacher = whole.student_and_teacher(before, task)
    known = len(teacher.head.weight)
    network.head = Rows.continuing(teacher.head, len(task.space.classes))
    share = whole.known_share(task)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, target = batch
        with torch.no_grad():
            remembered = teacher(pictures)
        z = network(pictures)
        return share * whole.distillation(z[:, :known], remembered) + (1 - share) * F.cross_entropy(z, target)

    whole.train(network, task, task.labelled(whole.replayed(task)), loss_of)
    align(network.head, whole.is_taught(task))
    return network


@torch.no_grad()
def align(head: Head, new: Tensor) -> None:
    """Scale the rows of new classes (a mask) so that they are as long on average as the others."""
    lengths = head.weight.norm(dim=1)
    if not new.all():
        head.weight[new] *= lengths[~new].mean() / lengths[new].mean()


def learn_on_features(before: Classifier, task: Task) -> OnFeatures:
    """γ of each branch; the rows of earlier steps are as long as the base's once they are aligned to them."""
    lengths = [head.weight.norm(dim=1).mean().item() for head in before.fused.heads]  # type: ignore[operator]
    return with_scales(before, [lengths[0] / each for each in lengths], [0.0] * len(lengths), task.device)


METHODS = (
    Method("wa", "WA", learn, on="network"),
    Method("fa-wa", "FA+WA", learn_on_features, on="features"),
)
