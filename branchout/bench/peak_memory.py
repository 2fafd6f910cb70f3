"""How much memory a measurement takes at most, and whether it has the GPU for itself."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch


def others_beside() -> bool:
    """Whether other processes use this GPU, so that times are too long. Our own context takes less than 1 GiB."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > 1 << 30


def forget_peak_memory() -> None:
    """Count peaks from here on, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Of the GPU during this job; without a GPU of the process, which earlier jobs may have made larger."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_of_process()


def peak_of_process() -> int | None:
    try:
        told = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(told[1]) * 1024 if told else None
    except OSError:
        return None
