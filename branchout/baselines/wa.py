"""WA, weight aligning: distillation and exemplars keep the network, but the new classes' rows of the head grow longer
than the old ones'; so at the end they are scaled by one factor γ until both are equally long on average. FA+WA does the
same to the head of the paper's new branch, which never touched the old ones.

Source: Zhao et al., CVPR 2020; λ = old/(old + new) and temperature 2 are theirs. FA+WA: the paper's section 5.2 (Wu et
al., CVPR 2022). As published the base and the network have a linear head without bias, whose weights are set to zero
where a step of descent made them negative; the whole head starts at random once more after the warm-up of every step,
as in the code of DER's authors, whose tables have WA. Departures of the default, which starts from the shared base:
lengths must count, which a cosine head's do not. So it goes on as linear rows without bias that read the same
normalised features and start where they give the same logits: in WA with the network, features being 16 long and rows
1; in FA+WA on frozen features of the new images, both 4 long. New rows of WA are imprinted, and rows may be negative:
those of a base trained without that limit would lose much of what they know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import Network, OnFeatures, with_scales
from branchout.baselines.published_training import first
from branchout.baselines.task import Baseline, Published, Task
from branchout.data.images import shuffled
from branchout.labels import Ints
from branchout.model.classifier import Classifier
from branchout.model.heads import NORM, CosineHead, FusedHead, Head, to_norm
from branchout.training.loop import seed_for

VIEWS = 2
"""Of each new image, for rows on frozen features: there are plenty of images."""
LENGTH = 16.0
"""Of the features that a network's rows read where the base had a cosine head, so that rows start 1 long.

A step of descent changes a row by so much, whatever its own length: rows as long as their features, 4, end as long as
they were though the new ones speak far too often, and aligning has nothing to measure.
"""


class Rows(nn.Linear):
    """Linear rows without bias, whose lengths count; features are first brought to one `length`, if there is any."""

    def __init__(self, features: int, classes: int, length: float | None) -> None:
        super().__init__(features, classes, bias=False)
        self.length = length

    @classmethod
    def continuing(cls, head: Head, classes: int, length: float = NORM) -> Rows:
        """Rows that give the logits of `head`, but for a bias, and zeros for more classes.

        A cosine head goes on with features of this `length`, a linear one with features as they are.
        """
        cosine = isinstance(head, CosineHead)
        rows = cls(head.weight.shape[1], classes, length if cosine else head.length if isinstance(head, Rows) else None)
        rows.to(head.weight.device)
        with torch.no_grad():
            rows.weight.zero_()[: len(head.weight)] = to_norm(head.weight) * NORM / length if cosine else head.weight
        return rows

    def read(self, h: Tensor) -> Tensor:
        """Features as the rows read them."""
        return h if self.length is None else F.normalize(h, dim=-1) * self.length

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(self.read(h))


def learn(before: Classifier | Network, task: Task) -> Network:
    network, teacher = whole_network.student_and_teacher(before, task)
    known = len(teacher.head.weight)
    network.head = imprinted(Rows.continuing(teacher.head, len(task.space.classes), LENGTH), known, teacher, task)
    whole_network.train(
        network,
        task,
        whole_network.new_and_exemplars(task),
        whole_network.distillation_loss(network, teacher, task),
    )
    align(network.head, whole_network.in_step(task))
    return network


class NonNegative(nn.Linear):
    """Linear rows without bias; before they are used, weights that a step of descent made negative are set to zero."""

    @classmethod
    def drawn(cls, features: int, classes: int, *, bias: bool = False) -> NonNegative:
        rows = cls(features, classes, bias=bias)
        nn.init.kaiming_normal_(rows.weight, nonlinearity="linear")
        return rows

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(h)


def learn_as_published(before: Network, task: Task) -> Network:
    network, teacher = whole_network.student_and_teacher(
        before, task, lambda like, classes: NonNegative.drawn(like.weight.shape[1], classes)
    )
    loss_of = whole_network.distillation_loss(network, teacher, task)
    samples = whole_network.new_and_exemplars(task)
    whole_network.train(network, task, samples, loss_of, redrawn=(network.head,))  # type: ignore[arg-type]
    with torch.no_grad():
        network.head.weight.clamp_(min=0)
    align(network.head, whole_network.in_step(task))
    return network


@torch.no_grad()
def imprinted(rows: Rows, known: int, teacher: Network, task: Task) -> Rows:
    """Rows of classes never seen before start as long as the others, along what the teacher sees in them and in no
    other class.

    With many old classes λ leaves little for them to learn from: rows that start at random are mostly that start at the
    end, and rows that start at zero are short. Aligning would make the ones noisy and the others far too loud. After a
    ReLU, features of all pictures share a large part; trained rows do not answer to it. Rows that did would be loud
    for every picture from the start, without being longer, and their length is all that aligning can mend.
    """
    means, seen = class_means(rows, teacher, task)
    own = means - means[seen].mean(0) if seen.sum() > 1 else means
    rows.weight[known:] = F.normalize(own[known:], dim=1) * rows.weight[:known].norm(dim=1).mean()
    return rows


def class_means(rows: Rows, teacher: Network, task: Task) -> tuple[Tensor, Tensor]:
    """The mean of what the teacher sees in each class (classes × k), new or of exemplars, and which have any image."""
    samples = whole_network.new_and_exemplars(task)
    h = whole_network.plain_outputs(teacher.features, task, samples)
    labels = torch.from_numpy(task.labels(samples)).to(task.device)
    sums = torch.zeros_like(rows.weight).index_add_(0, labels, rows.read(h))
    counts = torch.bincount(labels, minlength=len(sums))
    return sums / counts.clamp(min=1)[:, None], counts > 0


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
    data = feature_heads.cached(before, task, task.new, views=VIEWS)
    place = whole_network.place_in_step(task)

    def order(epoch: int) -> Sequence[Ints]:
        return shuffled(len(data.labels), task.heads.batch, seed_for(task.seed, epoch))

    def scores(features: Tensor) -> Tensor:
        return rows(features[:, before.fused.feature_of[-1]])  # type: ignore[no-any-return]

    feature_heads.train(rows, task, data, scores, lambda z, labels: F.cross_entropy(z, place[labels]), order)
    return rows


AS_PUBLISHED = Published(partial(first, make=NonNegative.drawn, redraw=True), learn_as_published)
BASELINES = (
    Baseline("wa", "WA", learn, on="network", published=AS_PUBLISHED),
    Baseline("fa-wa", "FA+WA", learn_on_features, on="features"),
)
