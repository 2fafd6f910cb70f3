"""Scores of the new classes by their mean features. They decide among the new classes, and about nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ClassMeans(nn.Module):
    """One linear score for each column of the new branches, from all feature vectors, each scaled to length 1.

    New logits become the weighted mean of the trained ones and these scores, moved so that the largest is as large as
    before. So an image that is given to an old class stays there, wherever the dial stands.
    """

    weight: Tensor
    bias: Tensor
    level: Tensor
    """What the dial and the offsets of the steps add to each column. The largest logit is found with it."""
    trained: Tensor
    """The weight of the trained logits; that of the scores is in `weight` and `bias`."""

    def __init__(self, columns: int, features: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(columns, features))
        self.register_buffer("bias", torch.zeros(columns))
        self.register_buffer("level", torch.zeros(columns))
        self.register_buffer("trained", torch.ones(1))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, level: Tensor, trained: float) -> Self:
        found = cls(*weight.shape)
        found.weight, found.bias, found.level = weight.float(), bias.float(), level.float()
        found.trained.fill_(trained)
        return found

    def at(self, share: float) -> Self:
        """With this weight of the scores, if they have all of it now; the trained logits get the rest."""
        return self.of(share * self.weight, share * self.bias, self.level, 1 - share)

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        u = torch.cat([F.normalize(h, dim=-1) for h in features], dim=-1)
        return F.linear(u, self.weight.to(u), self.bias.to(u))

    def forward(self, z: Tensor, features: Sequence[Tensor]) -> Tensor:
        """New logits (…, columns) from those before, given the model's feature vectors, each (…, k)."""
        level = self.level.to(z)
        before = z + level
        mean = self.trained.to(z) * before + self.scores(features).to(z)
        return mean - mean.amax(-1, keepdim=True) + before.amax(-1, keepdim=True) - level
