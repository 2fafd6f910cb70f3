"""Routing: decide first which split a picture comes from, then let that branch's own classifier answer alone. The
branch is the one most sure of its answer, or the one that a linear router on all branches' features names.

Source: the paper's section 4.1 (Wu et al., CVPR 2022). Departures: the learned router sees the class-balanced split
that all of stage II sees; the oracle sees every image, without augmentation. Its loss is convex, and with a slight
weight decay has one optimum, which L-BFGS finds: the same images give the same router, whatever the seed. Scores are
the probabilities that the chosen branch gives; they are no distribution over all classes, and no dial can move them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Baseline, Task
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead, Pooler

DECAY = 1e-4


class Router(nn.Module):
    """r̂: one score for each split from the concatenated features, W_r its only weights."""

    def __init__(self, width: int, splits: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, splits, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(feature_heads.concatenated(features))  # type: ignore[no-any-return]


class Routed(nn.Module):
    """One branch answers: its probabilities for its own classes, −1 for all others."""

    def __init__(self, fused: FusedHead, router: Router | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.router = router
        self.pooler = Pooler(fused.space, "max")

    def forward(self, features: Tensor) -> Tensor:
        space = self.fused.space
        columns = self.fused.head_columns(features.unbind(1))
        answers = [columns[:, space.slice_of(d)].softmax(1) for d in range(len(space.branches))]
        if self.router is None:
            chosen = torch.stack([p.amax(1) for p in answers], dim=1).argmax(1)
        else:
            chosen = self.router(features).argmax(1)
        alone = [p.where(chosen[:, None] == d, -torch.ones_like(p)) for d, p in enumerate(answers)]
        return self.pooler(torch.cat(alone, dim=1))  # type: ignore[no-any-return]


def balanced_loss(scores: Tensor, origin: Tensor) -> Tensor:
    """L_rt-bal: every split weighs the same, whatever its number of samples; one that is missing adds nothing."""
    splits = scores.shape[1]
    loss = F.cross_entropy(scores, origin, reduction="none")
    member = F.one_hot(origin, splits).to(loss)
    means = (loss @ member) / member.sum(0).clamp(min=1)
    return means.sum() / splits


def confident(before: Classifier, task: Task) -> OnFeatures:
    return OnFeatures(before, Routed(before.fused).to(task.device))


def learned(before: Classifier, task: Task, *, oracle: bool = False) -> OnFeatures:
    samples, views = (feature_heads.everything(task), 0) if oracle else (feature_heads.balanced(task), task.views)
    data = feature_heads.cached(before, task, samples, views=views)
    router = fitted(data.features.flatten(0, 1), data.origin.repeat(len(data.features)), len(task.space.branches))
    return OnFeatures(before, Routed(before.fused, router).to(task.device))


def fitted(features: Tensor, origin: Tensor, splits: int) -> Router:
    """The router with the least loss for features (N, feature vectors, k) from these splits."""
    router = Router(features.shape[1:].numel(), splits).to(features.device)
    nn.init.zeros_(router.linear.weight)

    def loss() -> Tensor:
        return balanced_loss(router(features), origin) + DECAY / 2 * router.linear.weight.square().sum()

    feature_heads.minimise(loss, list(router.parameters()), iterations=500)
    return router.requires_grad_(False)


BASELINES = (
    Baseline("confidence-routing", "confidence-based routing", confident, on="features", dial=False),
    Baseline("learned-routing", "learning-based routing w/ L_rt-bal", learned, on="features", dial=False),
    Baseline(
        "oracle-routing",
        "oracle routing w/ L_rt-bal",
        partial(learned, oracle=True),
        on="features",
        dial=False,
        oracle=True,
    ),
)
