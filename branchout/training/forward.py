"""Forward passes through frozen networks."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from branchout.training.out_of_memory import in_parts

MULTIPLE = {"cuda": 256}
"""The number of images in a forward pass is a multiple of this; elsewhere any number."""


def in_full_batches(work: Callable[[Tensor], list[Tensor]], images: Tensor) -> list[Tensor]:
    """`work(images)`. On a GPU a smaller batch is filled up with zeros, whose outputs are dropped.

    cuDNN prepares every convolution anew for each batch size that it has not seen, which takes longer than computing
    the added images.
    """
    added = -len(images) % MULTIPLE.get(images.device.type, 1)
    filled = F.pad(images, (0,) * (2 * images.ndim - 1) + (added,)) if added else images
    return [output[: len(images)] for output in in_parts(work, filled)]
