"""Run one command in a forked child, with limits on its time and memory, and judge how it ended."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10.0
MEMORY = 1 << 30
"""Limits of one case: wall-clock seconds, and bytes beyond what the parent holds when it forks."""


@dataclass(frozen=True)
class Ended:
    """How a child process ended."""

    status: int
    out: str
    err: str
    seconds: float
    bytes: int
    killed: bool

    def fault(self, seconds: float = SECONDS) -> str | None:
        """What is wrong with this end; None for success, and for an error that is a sentence."""
        if self.killed or self.seconds > seconds:
            return "hang"
        if "Traceback (most recent call last)" in self.err:
            return "traceback"
        if self.status < 0:
            return f"signal {-self.status}"
        if self.bytes > MEMORY:
            return "memory"
        if self.status not in (0, 1, 2, 130):
            return f"status {self.status}"
        if self.status and not self.err.strip():
            return "silent failure"
        return None


def command(*words: str | Path, seconds: float = SECONDS, prepare: Callable[[], None] | None = None) -> Ended:
    """`branchout WORDS`, in a fork of this process, which has everything imported."""

    def body() -> int:
        from branchout.cli import main

        sys.argv = ["branchout", *map(str, words)]
        try:
            main()
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        return 0

    return forked(body, seconds=seconds, prepare=prepare)


def forked(body: Callable[[], int], *, seconds: float, prepare: Callable[[], None] | None = None) -> Ended:
    sys.stdout.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(body, out.fileno(), err.fileno(), prepare)
        held = _resident(os.getpid())
        status, used, killed = _wait(child, seconds)
        took = time.monotonic() - start
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 20).decode("utf-8", "replace"))
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, texts[0], texts[1], took, max(0, used - held), killed)


def _child(body: Callable[[], int], out: int, err: int, prepare: Callable[[], None] | None) -> None:
    status = 70
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        if prepare is not None:
            prepare()
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(child: int, seconds: float) -> tuple[int, int, bool]:
    """The child's wait status, its largest resident size, and whether it had to be killed."""
    limit = time.monotonic() + seconds + 1
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # workers that it left behind
            return status, usage.ru_maxrss * 1024, False
        if time.monotonic() > limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return status, usage.ru_maxrss * 1024, True
        time.sleep(0.005)


def _resident(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def quiet_environment(folder: Path) -> Iterator[None]:
    """One thread, a cache of its own, no colours: what every case runs under."""
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", "BRANCHOUT_CACHE": str(folder / "cache"), "NO_COLOR": "1"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
