"""LogitCat: the logits of all branches are put side by side, and columns that name the same class are pooled. The heads
are left as they are, fine-tuned (FT), or retrained from scratch (RT) on a class-balanced split.

Source: the paper's sections 5.2 and 5.3 (Wu et al., CVPR 2022), where "logit concatenation" with max or average pooling
trains nothing. Departures: retrained heads are cosine heads whatever the base's is; a linear head is fine-tuned on
features scaled to an average length of 4, for which the learning rate is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Baseline, Task
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead, Pooler


class ConcatenatedLogits(nn.Module):
    """Each head reads the features of its own branch."""

    def __init__(self, space: LabelSpace, parts: Sequence[nn.Module], feature_of: Sequence[int], pooler: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.feature_of = tuple(feature_of)
        self.pooler = Pooler(space, pooler)

    def forward(self, features: Tensor) -> Tensor:
        columns = [part(features[:, f]) for part, f in zip(self.parts, self.feature_of, strict=True)]
        return self.pooler(torch.cat(columns, dim=1))  # type: ignore[no-any-return]


def pooled(before: Classifier, task: Task, *, pooler: str) -> OnFeatures:
    """Nothing is trained."""
    fused = before.fused
    return OnFeatures(
        before, ConcatenatedLogits(task.space, list(fused.heads), fused.feature_of, pooler).to(task.device)
    )


def trained(before: Classifier, task: Task, *, scratch: bool) -> OnFeatures:
    feature_heads.seed_step(task)
    data = feature_heads.cached(before, task, feature_heads.balanced(task), views=task.views)
    if scratch:
        parts: list[nn.Module] = [CosineHead(data.features.shape[-1], len(names)) for names in before.space.branches]
    else:
        pairs = zip(before.fused.heads, before.fused.feature_of, strict=True)
        parts = [feature_heads.trainable(head, data.features[:, :, f]) for head, f in pairs]  # type: ignore[arg-type]
    head = ConcatenatedLogits(task.space, parts, before.fused.feature_of, "max").to(task.device)
    feature_heads.train(head, task, data)
    return OnFeatures(before, head)


BASELINES = (
    Baseline("logitcat-rt", "LogitCat+RT", partial(trained, scratch=True), on="features"),
    Baseline("logitcat-ft", "LogitCat+FT", partial(trained, scratch=False), on="features"),
    *(
        Baseline(
            f"logitcat-{pooler}", f"logit concatenation ({short} pool)", partial(pooled, pooler=pooler), on="features"
        )
        for pooler, short in (("average", "avg"), ("max", "max"))
    ),
)
