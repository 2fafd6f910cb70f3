"""The device that computes."""

from __future__ import annotations

import torch

from branchout.errors import BranchoutError
from branchout.training.loop import best_device

Device = str | torch.device | None
"""`cpu`, `cuda` or `cuda:1`; None is a GPU if there is one."""


def device_named(device: Device) -> torch.device:
    """The device of this name, after checking that this machine has it."""
    if device is None:
        return best_device()
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        there = ", ".join(["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))])
        raise BranchoutError(f"There is no device {str(device)!r}. This machine has: {there}") from None
    return found
