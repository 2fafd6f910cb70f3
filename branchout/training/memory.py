"""Work on a device with too little memory is done in smaller parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_parts(work: Callable[[Tensor], list[Tensor]], batch: Tensor) -> list[Tensor]:
    """`work(batch)`; where the device runs out of memory, of each half, and so on."""
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        if len(batch) < 2:
            raise
    torch.cuda.empty_cache()
    halves = [in_parts(work, half) for half in torch.tensor_split(batch, 2)]
    return [torch.cat(tensors) for tensors in zip(*halves, strict=True)]
