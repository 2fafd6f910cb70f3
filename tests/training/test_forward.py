"""Forward passes of full batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchout.training import forward


@given(count=st.integers(0, 9), multiple=st.integers(1, 5))
def test_a_filled_up_batch_has_the_outputs_of_its_own_images(count: int, multiple: int) -> None:
    images = torch.rand(count, 2, 3, 4)
    sizes: list[int] = []

    def work(batch: Tensor) -> list[Tensor]:
        sizes.append(len(batch))
        return [2 * batch, batch.flatten(1).sum(1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(forward.MULTIPLE, "cpu", multiple)
        doubled, sums = forward.in_full_batches(work, images)
    assert torch.equal(doubled, 2 * images)
    assert torch.equal(sums, images.flatten(1).sum(1))
    assert sizes == [-(-count // multiple) * multiple]


def test_a_cpu_computes_as_many_images_as_there_are() -> None:
    assert forward.in_full_batches(lambda batch: [torch.tensor([len(batch)])], torch.rand(7, 1))[0].item() == 7
