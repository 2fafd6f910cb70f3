"""Work on a device with too little memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from branchout.training.memory import in_parts


def test_a_batch_too_large_for_the_device_is_computed_in_parts() -> None:
    sizes: list[int] = []

    def work(batch: Tensor) -> list[Tensor]:
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError
        return [2 * batch, batch.sum(1)]

    batch = torch.arange(20.0).view(10, 2)
    doubled, sums = in_parts(work, batch)
    assert torch.equal(doubled, 2 * batch)
    assert torch.equal(sums, batch.sum(1))
    assert sizes == [10, 5, 3, 2, 5, 3, 2]


def test_a_single_image_that_does_not_fit_is_an_error() -> None:
    def work(batch: Tensor) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        in_parts(work, torch.zeros(4, 1))
