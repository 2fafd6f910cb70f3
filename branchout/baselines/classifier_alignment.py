"""Classifier alignment: each class is remembered as a Gaussian of its features, and the classifier over all
classes is trained on as many features drawn from one Gaussian as from any other. No class is rare then.

Source: the second stage of Zhang, Wang, Kang, Chen, Wei: "SLCA: Slow Learner with Classifier Alignment for Class
Incremental Learning on a Pre-trained Model" (ICCV 2023), whose first trains the network slowly. Departures: the network
is the frozen base, and new rows start as class means. Logits are normalised for linear heads only, since those of a
cosine head cannot grow. A covariance of few images is drawn towards the one that all classes share; base classes are
described by their exemplars (`classifier-alignment-all`: by all their images). A class that comes again has one
Gaussian and one row for each look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import class_features, feature_heads
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Task, on_base
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import Head, Pooler, new_head
from branchout.training.loop import fit, seed_for

DRAWN = 128
"""Features drawn of each Gaussian in an epoch: in our ten epochs as many as in the source's five of 256."""
TEMPERATURE = 0.1


class Aligned(nn.Module):
    """A head with one row per column, and the Gaussians it was trained on."""

    means: Tensor
    factors: Tensor
    shared: Tensor

    def __init__(self, space: LabelSpace, head: Head, means: Tensor, factors: Tensor, shared: Tensor) -> None:
        super().__init__()
        self.head = head
        self.pooler = Pooler(space, "max")
        self.register_buffer("means", means)
        self.register_buffer("factors", factors)
        self.register_buffer("shared", shared)

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the network and a head: none, for Gaussians are for later steps."""
        return 0

    def forward(self, features: Tensor) -> Tensor:
        return self.pooler(self.head(features.flatten(1)))  # type: ignore[no-any-return]


def shared_covariance(groups: Sequence[Tensor]) -> Tensor:
    """The covariance of features around the mean of their own group."""
    centred = torch.cat([group - group.mean(0) for group in groups])
    return centred.T @ centred / max(len(centred) - len(groups), 1)


def factor(group: Tensor, shared: Tensor) -> Tensor:
    """L with L Lᵀ = Σ. A group of n images counts for n of n + k: with fewer than k its own covariance is singular."""
    count, k = group.shape
    own = count / (count + k) * shared_covariance([group]) + k / (count + k) * shared
    jitter = 1e-4 * own.diagonal().mean().clamp(min=1e-8) * torch.eye(k).to(own)
    return torch.linalg.cholesky(own + jitter)  # type: ignore[no-any-return]


def normalised(z: Tensor, space: LabelSpace) -> Tensor:
    """z/(τ‖z‖), the norm being the mean of the branches' own: longer logits cannot lower the loss."""
    lengths = [z[:, space.slice_of(d)].norm(dim=1) for d in range(len(space.branches))]
    return z / (TEMPERATURE * torch.stack(lengths).mean(0).clamp(min=1e-7))[:, None]


def widened(head: Head, means: Tensor) -> Head:
    """A copy of a head with further rows that point along these means."""
    fresh = new_head(head, len(means)).to(means.device)
    directions = F.normalize(means, dim=1) * fresh.weight.detach().norm(dim=1, keepdim=True)
    wide = new_head(head, len(head.weight) + len(means)).to(means.device)
    with torch.no_grad():
        wide.weight.copy_(torch.cat([head.weight, directions]))
        if isinstance(wide, nn.Linear) and isinstance(head, nn.Linear) and head.bias is not None:
            wide.bias.copy_(torch.cat([head.bias, head.bias.mean().expand(len(means))]))
    return wide


def learn(before: Classifier | OnFeatures, task: Task, *, everything: bool = False) -> OnFeatures:
    feature_heads.seed_step(task)
    model, known, groups = class_features.of_base(before, task, everything=everything)
    means = torch.stack([group.mean(0) for group in groups])
    assert known is None or isinstance(known, Aligned)
    shared = shared_covariance(groups) if known is None else known.shared
    factors = torch.stack([factor(group, shared) for group in groups])
    of_step = means[-len(task.space.branches[-1]) :]
    head = widened(model.base_head if known is None else known.head, of_step)
    if known is not None:
        means, factors = torch.cat([known.means, means]), torch.cat([known.factors, factors])
    head = aligned(head, means, factors, task)
    return OnFeatures(model, Aligned(task.space, head, means, factors, shared).to(task.device))


def aligned(head: Head, means: Tensor, factors: Tensor, task: Task) -> Head:
    """The head after training all its rows on features drawn from all Gaussians."""
    pooler = Pooler(task.space, "max").to(task.device)
    labels = torch.from_numpy(task.space.class_of_column).to(task.device).repeat_interleave(DRAWN)
    columns, k = means.shape
    trained = feature_heads.trainable(head, means)

    def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(task.device).manual_seed(seed_for(task.seed, epoch))
        noise = torch.randn(columns, DRAWN, k, generator=generator, device=task.device)
        drawn = torch.baddbmm(means[:, None], noise, factors.mT).flatten(0, 1)
        order = torch.randperm(len(drawn), generator=generator, device=task.device)
        for index in torch.split(order, task.heads.batch):
            yield drawn[index], labels[index]

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        features, target = batch
        z = trained(features)
        return F.cross_entropy(pooler(normalised(z, task.space) if isinstance(head, nn.Linear) else z), target)

    steps = -(-len(labels) // task.heads.batch)
    parameters = list(trained.parameters())
    fit(
        trained, parameters, epoch_batches, steps, loss_of, task.heads, device=task.device, on_progress=task.on_progress
    )
    return feature_heads.plain_head(trained)


BASELINES = on_base("classifier-alignment", "classifier alignment (SLCA's second stage)", learn)
