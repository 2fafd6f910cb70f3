"""RanPAC: a fixed random projection with ReLU makes the frozen features many more, and ridge regression on those gives
the classifier. Its normal equations are sums over images, so a step adds its own, solves again and forgets nothing.

Source: McDonnell, Gong, Parvaneh, Abbasnejad, van den Hengel: "RanPAC: Random Projections and Pre-trained Models for
Continual Learning" (NeurIPS 2023), without its first-session adapters. Departures: every class of every step weighs the
same in the sums, since old ones come with few exemplars and RanPAC supposes all their images (`ranpac-all` has them).
The ridge, relative to the mean of the Gram matrix's diagonal, is chosen at the first step, where images of base and new
classes can be held out, and by accuracy, in which both count half: by squared error the many base classes would decide
alone. The projection is at most 20 times as wide as the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import class_features
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Task, on_base
from branchout.model.classifier import Classifier
from branchout.training.loop import seed_for

WIDTH = 10_000
"""Random features, as in the source."""
RIDGES: tuple[float, ...] = tuple(10.0 ** (power / 4) for power in range(-32, 9))

TOGETHER = 4096
"""Images, or a few more, that are computed together."""

Lift = Callable[[Tensor], Tensor]
"""Features → random features."""


class RidgeHead(nn.Module):
    """relu(h P) W, and the sums from which W follows."""

    projection: Tensor
    gram: Tensor
    moments: Tensor
    weight: Tensor

    def __init__(self, projection: Tensor, gram: Tensor, moments: Tensor, weight: Tensor, ridge: float) -> None:
        super().__init__()
        self.ridge = ridge
        self.register_buffer("projection", projection)
        self.register_buffer("gram", gram)
        self.register_buffer("moments", moments)
        self.register_buffer("weight", weight)

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the network; the sums are for later steps."""
        return self.projection.numel() + self.weight.numel()

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(features.flatten(1) @ self.projection) @ self.weight


def add(gram: Tensor, moments: Tensor, groups: Sequence[Tensor], numbers: Sequence[int], lift: Lift) -> None:
    """Random features of groups join the sums, each group with a total weight of 1; `numbers` are their classes.

    Products of many images are summed at a time: each small one would read and write the whole matrix.
    """
    for some in together([len(group) for group in groups]):
        weighted = []
        for place in some:
            x = lift(groups[place])
            moments[:, numbers[place]] += x.mean(0)
            weighted.append(x / math.sqrt(len(x)))
        stacked = torch.cat(weighted)
        gram.addmm_(stacked.T, stacked)


def spectrum(groups: Sequence[Tensor], lift: Lift) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors (width × values) of the Gram matrix of groups that weigh the same.

    Of fewer images than random features, X Xᵀ is smaller than XᵀX and has the same eigenvalues but for zeros. Without
    zeros nothing is lost: the means of the groups are sums of images, so their part along those eigenvectors is zero.
    """
    width = lift(groups[0][:1]).shape[1]
    if sum(map(len, groups)) >= width:
        gram = torch.zeros(width, width, dtype=torch.float64, device=groups[0].device)
        add(gram, torch.zeros_like(gram[:, :1]), groups, [0] * len(groups), lift)
        values, vectors = torch.linalg.eigh(gram)
        return values.clamp(min=0), vectors
    x = torch.cat([lift(group) / math.sqrt(len(group)) for group in groups])
    values, left = torch.linalg.eigh(x @ x.T)
    found = values > len(x) * torch.finfo(values.dtype).eps * values.max()
    return values[found], x.T @ (left[:, found] / values[found].sqrt())


def held_out(group: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A group without a fifth of it, and that fifth: at least one image, unless there is only one."""
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed)).to(group.device)
    count = max(len(group) // 5, 1) if len(group) > 1 else 0
    return group[order[count:]], group[order[:count]]


def best_ridge(
    groups: Sequence[Tensor], numbers: Sequence[int], branches: Sequence[int], classes: int, lift: Lift, seed: int
) -> float:
    """The ridge, relative to the diagonal, with the best accuracy on a held-out fifth of each group; of equal ones the
    largest. Groups of one branch weigh the same, and so do branches.

    With G = V D Vᵀ the scores of x are (x V) (D + λ)⁻¹ (Vᵀ C) for every λ: one eigendecomposition serves all.
    """
    parts = [held_out(group, seed_for(seed, place)) for place, group in enumerate(groups)]
    fitted = [group for group, _ in parts]
    values, vectors = spectrum(fitted, lift)
    means = torch.stack([lift(group).mean(0) for group in fitted]) @ vectors
    number_of = torch.tensor(list(numbers))
    turned = torch.zeros(len(values), classes).to(vectors)
    turned.index_add_(1, number_of.to(turned.device), means.T)
    level = values.sum() / len(vectors)
    right = torch.zeros(len(groups), len(RIDGES), dtype=torch.float64)
    for some in together([len(kept) for _, kept in parts]):
        group_of = torch.tensor([place for place in some for _ in parts[place][1]])
        x = lift(torch.cat([parts[place][1] for place in some])) @ vectors
        for column, ridge in enumerate(RIDGES):
            answers = ((x / (values + ridge * level)) @ turned).argmax(1).cpu()
            right[:, column].index_add_(0, group_of, (answers == number_of[group_of]).double())
    tested = {branch: [n for n, of in enumerate(branches) if of == branch and len(parts[n][1])] for branch in branches}
    accuracy = [
        torch.stack([right[place] / len(parts[place][1]) for place in places]).mean(0)
        for places in tested.values()
        if places
    ]
    if not accuracy:  # single images: nothing can be held out
        return 1.0
    balanced = torch.stack(accuracy).mean(0)
    return RIDGES[int((balanced >= balanced.max() - 1e-9).nonzero().max())]


def together(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Places of groups of these sizes that are computed together; empty groups are left out."""
    some: list[int] = []
    for place in (place for place, size in enumerate(sizes) if size):
        some.append(place)
        if sum(sizes[each] for each in some) >= TOGETHER:
            yield some
            some = []
    if some:
        yield some


def learn(before: Classifier | OnFeatures, task: Task, *, everything: bool = False) -> OnFeatures:
    model, known, groups = class_features.of_base(before, task, everything=everything)
    classes = len(task.space.classes)
    if isinstance(known, RidgeHead):
        projection, gram = known.projection, known.gram.clone()
        moments = F.pad(known.moments, (0, classes - known.moments.shape[1]))
    else:
        k = groups[0].shape[1]
        width = min(WIDTH, 20 * k)
        generator = torch.Generator().manual_seed(seed_for(task.seed, 0))
        projection = torch.randn(k, width, generator=generator).to(task.device)
        gram, moments = (torch.zeros(width, n, dtype=torch.float64, device=task.device) for n in (width, classes))

    def lift(group: Tensor) -> Tensor:
        # Sums of thousands of products make a nearly singular matrix: single precision would not do.
        return F.relu(group @ projection).double()

    numbers, branches = (
        column[-len(groups) :].tolist() for column in (task.space.class_of_column, task.space.branch_of_column)
    )
    ridge = (
        known.ridge if isinstance(known, RidgeHead) else best_ridge(groups, numbers, branches, classes, lift, task.seed)
    )
    add(gram, moments, groups, numbers, lift)
    regular = gram.clone()
    regular.diagonal().add_(ridge * gram.diagonal().mean())
    weight = torch.linalg.solve(regular, moments)
    return OnFeatures(model, RidgeHead(projection, gram, moments, weight.float(), ridge).to(task.device))


BASELINES = on_base("ranpac", "RanPAC", learn)
