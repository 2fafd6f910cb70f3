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


def test_a_batch_that_is_too_large_when_filled_up_is_computed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forward.MULTIPLE, "cpu", 8)
    sizes: list[int] = []

    def work(batch: Tensor) -> list[Tensor]:
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError
        return [batch + 1]

    images = torch.rand(3, 2)
    assert torch.equal(forward.in_full_batches(work, images)[0], images + 1)
    assert sizes == [8, 3]


def test_several_processes_fill_up_their_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forward.MULTIPLE, "cpu", 256)
    monkeypatch.setattr(forward.processes, "count", lambda: 3)
    seen: list[int] = []
    forward.in_full_batches(lambda batch: [seen.append(len(batch)) or batch], torch.rand(80, 1))  # type: ignore[func-returns-value]
    assert seen == [86]


def test_a_cpu_computes_as_many_images_as_there_are() -> None:
    assert forward.in_full_batches(lambda batch: [torch.tensor([len(batch)])], torch.rand(7, 1))[0].item() == 7
