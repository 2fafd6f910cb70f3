"""Forward passes through frozen networks."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from branchout.training import processes
from branchout.training.out_of_memory import empty_cache, in_parts, out_of_memory

MULTIPLE = {"cuda": 256}
"""The number of images in a forward pass is a multiple of this; elsewhere any number."""


def in_full_batches(work: Callable[[Tensor], list[Tensor]], images: Tensor) -> list[Tensor]:
    """`work(images)`. On a GPU a smaller batch is filled up with zeros, whose outputs are dropped.

    cuDNN prepares every convolution anew for each batch size that it has not seen, which takes longer than computing
    the added images.
    """
    multiple = MULTIPLE.get(images.device.type, 1)
    added = -len(images) % -(-multiple // processes.count())  # several processes share a batch
    if added:
        try:
            filled = F.pad(images, (0,) * (2 * images.ndim - 1) + (added,))
            return [output[: len(images)] for output in work(filled)]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        empty_cache()
    return in_parts(work, images)
