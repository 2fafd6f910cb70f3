"""Commands in several processes, as `accelerate launch -m branchout …` starts them: one prints, all end together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from branchout.errors import BranchoutError, LostProcess

COMMANDS = ("pretrain", "extend", "bench")
SECONDS_TO_END = 5.0
"""How long other processes hold an error back: if the first one fails too, the launcher ends them meanwhile."""


def is_distributed() -> bool:
    """Whether a launcher started several processes; a WORLD_SIZE without their addresses describes none."""
    places = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and all(name in os.environ for name in places)


def rank() -> int:
    """The number of this process in its run; 0 also if it was started alone."""
    return int(os.environ.get("RANK", "0")) if is_distributed() else 0


@contextmanager
def one_prints(command: str) -> Iterator[None]:
    """Refuse commands that several processes cannot share; silence all processes but the first."""
    if command in COMMANDS and (is_distributed() or "ACCELERATE_MIXED_PRECISION" in os.environ):
        from branchout.training import processes

        processes.begin(together=is_distributed(), alike=command == "bench")
    if not is_distributed():
        yield
        return
    if command not in COMMANDS:
        raise BranchoutError(
            f"`branchout {command}` runs in one process; accelerate launch is for {', '.join(COMMANDS)}. "
            f"Run: branchout {command} …"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent by the launcher when another process has ended
    if rank() == 0:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def let_first_speak(error: Exception) -> None:
    """Before an error is printed: the launcher ends this process meanwhile if the first one failed too.

    That another process has ended is said at once: it may have been the first.
    """
    if rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(0 if rank() == 1 and isinstance(error, LostProcess) else SECONDS_TO_END)
        print(f"process {rank()}:", file=sys.stderr)
