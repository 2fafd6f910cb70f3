"""The device that computes."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

import torch

from branchout.errors import BranchoutError
from branchout.training import processes
from branchout.training.loop import best_device

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
Device = str | torch.device | None
"""`cpu`, `cuda` or `cuda:1`; None is a GPU if there is one."""


def device_named(device: Device) -> torch.device:
    """The device of this name, after checking that this machine has it."""
    if device is None:
        device = best_device()
    if processes.count() > 1 and str(device).partition(":")[0] == "cuda":
        device = torch.device("cuda", processes.local_rank())  # each process has a GPU of its own
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        there = ", ".join(["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))])
        raise BranchoutError(f"There is no device {str(device)!r}. This machine has: {there}") from None
    processes.join(found)
    if found.type == "cpu":
        keep_freed_memory()
    return found


def give_back_memory() -> None:
    """Return freed memory to the system: after a stage whose tensors the next one does not need."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@cache
def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors up to 32 MB, the most it allows, instead of returning it each time.

    Otherwise every large tensor is made of fresh pages, and a forward pass spends half its time in the kernel.
    """
    with suppress(OSError, AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        for option, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, (1 << 31) - 1)):
            set_option(option, value)
