"""Work on a device with too little memory is done in smaller parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Items = TypeVar("Items", Tensor, Sequence[tuple[float, float]])


def in_parts(work: Callable[[Items], list[Tensor]], items: Items, dim: int = 0) -> list[Tensor]:
    """`work(items)`; where the device runs out of memory, of each half, and so on, joined along `dim`."""
    try:
        return work(items)
    except RuntimeError as error:
        if not out_of_memory(error) or len(items) < 2:
            raise
    empty_cache()
    middle = (len(items) + 1) // 2
    halves = [in_parts(work, half, dim) for half in (items[:middle], items[middle:])]
    return [torch.cat(tensors, dim) for tensors in zip(*halves, strict=True)]


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU has too little memory; for Apple's there is no error of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error)


def empty_cache() -> None:
    """Give memory that torch keeps for later back to the GPU."""
    torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
