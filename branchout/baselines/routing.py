"""Routing: decide first which split a picture comes from, then let that branch's own classifier answer alone. The
branch is the one most sure of its answer, or the one that a linear router on all branches' features names.

Source: the paper's section 4.1 (Wu et al., CVPR 2022). Departures: the learned router sees the class-balanced split
that all of stage II sees; the oracle, which sees every image, gets one augmented view of each. Scores are the
probabilities that the chosen branch gives; they are no distribution over all classes, and no dial can move them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.feature_heads import Batch
from branchout.baselines.networks import OnFeatures
from branchout.baselines.registry import Baseline
from branchout.baselines.task import Task
from branchout.data.images import shuffled
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead, Pooler
from branchout.training.loop import seed_for


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
        columns = self.fused.frozen_columns(features.unbind(1))
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
    feature_heads.seed_step(task)
    if oracle:
        data = feature_heads.cached(before, task, feature_heads.everything(task), views=1)
    else:
        data = feature_heads.cached(before, task, feature_heads.balanced(task), views=task.views)
    _, count, vectors, k = data.features.shape
    router = Router(vectors * k, len(task.space.branches)).to(task.device)

    def loss_of(batch: Batch) -> Tensor:
        features, _, origin = batch
        return balanced_loss(router(features), origin)

    feature_heads.train(
        router, task, data, lambda epoch: shuffled(count, task.heads.batch, seed_for(task.seed, epoch)), loss_of
    )
    return OnFeatures(before, Routed(before.fused, router).to(task.device))


BASELINES = (
    Baseline("confidence-routing", "confidence-based routing", confident, on="features", dial=False, seeded=False),
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
