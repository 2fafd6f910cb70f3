"""The device that computes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from branchout.errors import BranchoutError
from branchout.training import processes
from branchout.training.loop import best_device

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
Item = TypeVar("Item")
Device = str | torch.device | None
"""`cpu`, `cuda`, `cuda:1` or `mps`, an Apple GPU; None is a CUDA GPU if there is one, else the CPU."""


def device_named(device: Device) -> torch.device:
    """The device of this name, after checking that this machine has it."""
    if device is None:
        device = best_device()
    if processes.count() > 1 and str(device).partition(":")[0] == "cuda":
        device = torch.device("cuda", processes.local_rank())  # each process has a GPU of its own
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        there = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise BranchoutError(f"There is no device {str(device)!r}. This machine has: {', '.join(there)}") from None
    if found.type == "mps" and processes.count() > 1:
        raise BranchoutError("Several processes share CUDA GPUs or CPUs, not an Apple GPU. Use --device cpu")
    processes.join(found)
    if found.type == "cpu":
        keep_freed_memory()
    return found


def wait_for(device: torch.device) -> None:
    """Wait until the device has computed all that it was asked to, for example before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def in_double(tensor: Tensor) -> Tensor:
    """In double precision; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def give_back_memory() -> None:
    """Return freed memory to the system: after a stage whose tensors the next one does not need."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


EVERY = 16
"""Batches after which freed memory is returned."""


def giving_back(stream: Iterable[Item]) -> Iterator[Item]:
    """The batches of a stream, with freed memory returned now and then: glibc keeps more of it with every batch."""
    for number, item in enumerate(stream, 1):
        yield item
        if number % EVERY == 0:
            give_back_memory()


@cache
def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors up to 32 MB, the most it allows, instead of returning it each time.

    Otherwise every large tensor is made of fresh pages, and a forward pass spends half its time in the kernel.
    """
    with suppress(OSError, AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        for option, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, (1 << 31) - 1)):
            set_option(option, value)
