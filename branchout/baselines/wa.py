"""WA, weight aligning: distillation and exemplars keep the network, but the new classes' rows of the head grow longer
than the old ones'; so at the end they are scaled by one factor γ until both are equally long on average. FA+WA does the
same to the head of the paper's new branch, which never touched the old ones.

Source: Zhao et al., CVPR 2020; λ = old/(old + new) and temperature 2 are theirs. FA+WA: the paper's section 5.2 (Wu et
al., CVPR 2022). Departures: lengths must count, which a cosine head's do not. So it goes on as linear rows without bias
that read the same normalised features and start where they give the same logits: in WA with the network, in FA+WA on
frozen features of the new images. New rows of WA are imprinted, and none are clipped at zero, where a base's are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import heads, whole
from branchout.baselines.branches import with_scales
from branchout.baselines.common import Ints, Network, OnFeatures, Task
from branchout.baselines.heads import Batch
from branchout.baselines.registry import Method
from branchout.data.batches import shuffled
from branchout.model.classifier import Classifier
from branchout.model.fusion import NORM, CosineHead, FusedHead, Head, to_norm
from branchout.train.loop import seed_for

VIEWS = 2
"""Of each new image, for rows on frozen features: there are plenty of images."""


class Rows(nn.Linear):
    """Linear rows without bias, whose lengths count; features come at length 4 if the base's head had them so."""

    def __init__(self, features: int, classes: int, normalised: bool) -> None:
        super().__init__(features, classes, bias=False)
        self.normalised = normalised

    @classmethod
    def continuing(cls, head: Head, classes: int) -> Rows:
        """Rows that give the logits of `head`, but for a bias, and zeros for more classes."""
        cosine = isinstance(head, CosineHead)
        rows = cls(head.weight.shape[1], classes, cosine or (isinstance(head, Rows) and head.normalised))
        rows.to(head.weight.device)
        with torch.no_grad():
            rows.weight.zero_()[: len(head.weight)] = to_norm(head.weight) if cosine else head.weight
        return rows

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(to_norm(h) if self.normalised else h)


def learn(before: Classifier | Network, task: Task) -> Network:
    network, teacher = whole.student_and_teacher(before, task)
    known = len(teacher.head.weight)
    network.head = imprinted(Rows.continuing(teacher.head, len(task.space.classes)), known, teacher, task)
    whole.train(network, task, task.labelled(whole.replayed(task)), whole.remembering(network, teacher, task))
    align(network.head, whole.is_taught(task))
    return network


@torch.no_grad()
def imprinted(rows: Rows, known: int, teacher: Network, task: Task) -> Rows:
    """Rows of classes never seen before start as long as the others, along the mean of what the teacher sees in them.

    With many old classes λ leaves little for them to learn from: rows that start at random are mostly that start at the
    end, and rows that start at zero are short. Aligning would make the ones noisy and the others far too loud.
    """
    h = whole.plain(teacher.features, task, task.new)
    u = to_norm(h) if rows.normalised else h - h.mean(0)  # a linear head expects logits around zero
    sums = torch.zeros_like(rows.weight).index_add_(0, torch.from_numpy(task.labels(task.new)).to(task.device), u)
    rows.weight[known:] = F.normalize(sums[known:], dim=1) * rows.weight[:known].norm(dim=1).mean()
    return rows


@torch.no_grad()
def align(head: Head, new: Tensor) -> None:
    """Scale the rows of new classes (a mask) so that they are as long on average as the others."""
    lengths = head.weight.norm(dim=1)
    if not new.all():
        head.weight[new] *= lengths[~new].mean() / lengths[new].mean().clamp(min=1e-12)


class NewestAligned(nn.Module):
    """The frozen logits of all branches, those of the newest from rows of its own, pooled."""

    def __init__(self, fused: FusedHead, rows: Rows) -> None:
        super().__init__()
        self.fused = fused
        self.rows = rows

    def forward(self, features: Tensor) -> Tensor:
        z = self.fused.frozen_columns(features.unbind(1))
        own = self.rows(features[:, self.fused.feature_of[-1]])
        return self.fused.pooler(torch.cat([z[:, : -len(self.rows.weight)], own], dim=1))  # type: ignore[no-any-return]


def learn_on_features(before: Classifier, task: Task) -> OnFeatures:
    """γ for each branch of a linear base; of a cosine one earlier branches are as long as the base anyway: all 4."""
    if isinstance(before.base_head, CosineHead):
        rows = relearned(before, task)
        with torch.no_grad():
            rows.weight *= NORM / rows.weight.norm(dim=1).mean()
        return OnFeatures(before, NewestAligned(before.fused, rows)).eval()
    lengths = [head.weight.norm(dim=1).mean().item() for head in before.fused.heads]  # type: ignore[operator]
    return with_scales(before, [lengths[0] / each for each in lengths], [0.0] * len(lengths), task.device)


def relearned(before: Classifier, task: Task) -> Rows:
    """The newest branch's head as rows whose lengths count, trained as stage I trains it: on the new classes alone."""
    newest: Head = before.fused.heads[-1]  # type: ignore[assignment]
    rows = Rows.continuing(newest, len(newest.weight))
    data = heads.cached(before, task, task.new, views=VIEWS)
    place = whole.place_among_taught(task)

    def order(epoch: int) -> Sequence[Ints]:
        return shuffled(len(data.labels), task.heads.batch, seed_for(task.seed, epoch))

    def loss_of(batch: Batch) -> Tensor:
        features, labels, _ = batch
        return F.cross_entropy(rows(features[:, before.fused.feature_of[-1]]), place[labels])

    heads.train(rows, task, data, order, loss_of)
    return rows


METHODS = (
    Method("wa", "WA", learn, on="network"),
    Method("fa-wa", "FA+WA", learn_on_features, on="features"),
)
