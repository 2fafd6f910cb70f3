"""Training that ends in the same weights each time."""

import pytest
import torch

from branchout.training.loop import LONG_TRAINING, fastest_convolutions
from branchout.training.repeatable import repeatable

CUDA = torch.device("cuda")


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_a_gpu_uses_the_same_kernels_in_every_run_until_the_training_ends() -> None:
    before = settings()
    with repeatable(CUDA):
        assert settings() == (True, True, False)
    assert settings() == before


def test_settings_are_restored_after_an_error() -> None:
    before = settings()
    with pytest.raises(KeyboardInterrupt), repeatable(CUDA):
        raise KeyboardInterrupt
    assert settings() == before


def test_a_cpu_is_left_alone() -> None:
    before = settings()
    with repeatable(torch.device("cpu")):
        assert settings() == before


@pytest.mark.parametrize("already", [False, True])
def test_cudnn_does_not_measure_in_repeatable_training(already: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", already)
    with fastest_convolutions(CUDA, LONG_TRAINING):
        assert torch.backends.cudnn.benchmark
    with repeatable(CUDA), fastest_convolutions(CUDA, LONG_TRAINING):
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == already
