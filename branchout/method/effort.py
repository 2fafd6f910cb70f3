"""How much stage I computes on which machine (the paper has one setting, for GPUs)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from branchout.data.images import SMALL

VIEWS = {"cuda": 15, "cpu": 4}
"""Cached views in stage I, by device: more take memory and time, fewer cost accuracy."""


@dataclass(frozen=True)
class Effort:
    """How much stage I computes; more takes time and memory, less costs accuracy."""

    views: int
    """Augmented views of each new image whose trunk outputs are cached."""
    exemplar_views: int | None = None
    """Views of each exemplar; None for as many as make both pools equally large."""
    exemplar_share: float = 1.0
    """Exemplars in a batch for every new image."""
    epochs: int | None = None
    """None for the recipe's."""


FULL = Effort(VIEWS["cuda"])
SMALL_INPUTS = Effort(VIEWS["cpu"])
LARGE_INPUTS = Effort(VIEWS["cpu"], exemplar_views=1, exemplar_share=0.5, epochs=15)


def effort_for(device: torch.device, size: int) -> Effort:
    """On a GPU all that pays; on a CPU what takes minutes for networks of this input size."""
    if device.type == "cuda":
        return FULL
    return SMALL_INPUTS if size <= SMALL else LARGE_INPUTS
