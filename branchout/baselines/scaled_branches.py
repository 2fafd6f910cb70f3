"""One scale and one shift for each branch's logits: how FA+BiC and FA+WA balance the branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from branchout.baselines.networks import OnFeatures
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead


class ScaledBranches(nn.Module):
    """The frozen logits of all branches, each branch's scaled and shifted, then pooled."""

    scale: Tensor
    shift: Tensor

    def __init__(self, fused: FusedHead, scale: Sequence[float], shift: Sequence[float]) -> None:
        super().__init__()
        self.fused = fused
        widths = torch.tensor([len(names) for names in fused.space.branches])
        for name, values in (("scale", scale), ("shift", shift)):
            self.register_buffer(name, torch.repeat_interleave(torch.tensor(values), widths))

    def forward(self, features: Tensor) -> Tensor:
        z = self.fused.frozen_columns(features.unbind(1))
        return self.fused.pooler(z * self.scale + self.shift)  # type: ignore[no-any-return]


def with_scales(model: Classifier, scale: Sequence[float], shift: Sequence[float], device: torch.device) -> OnFeatures:
    return OnFeatures(model, ScaledBranches(model.fused, scale, shift)).to(device).eval()
