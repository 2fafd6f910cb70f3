"""Which devices are accepted. An Apple GPU is imitated: torch's own operations on one are not tested here."""

import pytest
import torch

from branchout.errors import BranchoutError
from branchout.model.resnet import build
from branchout.training import device, processes
from branchout.training.loop import precision

MPS = torch.device("mps")


def test_an_apple_gpu_is_used_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(device.torch, "empty", lambda _, device: asked.append(device))
    assert device.device_named("mps") == MPS
    assert asked == [MPS]
    monkeypatch.setattr(processes, "_launch", processes.Launch(count=2))
    with pytest.raises(BranchoutError, match="--device cpu"):
        device.device_named("mps")


def test_a_missing_device_is_named_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(BranchoutError, match=r"'cuda:99'.*cpu.*mps"):
        device.device_named("cuda:99")


def test_an_apple_gpu_computes_in_single_precision() -> None:
    with precision(MPS):
        assert not torch.is_autocast_enabled("mps")
    assert build("resnet10", width=8).layout(MPS) == torch.contiguous_format


class OnApple:
    """A tensor on an Apple GPU, where `double` is an error."""

    device = MPS

    def cpu(self) -> torch.Tensor:
        return torch.ones(2)

    def double(self) -> torch.Tensor:
        raise TypeError("MPS does not support float64")


def test_double_precision_is_computed_on_the_cpu_for_an_apple_gpu() -> None:
    assert device.in_double(OnApple()).dtype == torch.float64  # type: ignore[arg-type]
    assert device.in_double(torch.ones(2)).dtype == torch.float64


def test_freed_memory_is_returned_while_a_long_stream_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(device, "EVERY", 4)
    monkeypatch.setattr(device, "give_back_memory", lambda: returned.append(1))
    assert list(device.giving_back(range(3))) == [0, 1, 2]
    assert not returned
    assert list(device.giving_back(range(10))) == list(range(10))
    assert len(returned) == 2
