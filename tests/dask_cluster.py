"""A Dask cluster of a scheduler and two workers in processes of their own, of which a test may kill one."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Process = subprocess.Popen[bytes]


@contextmanager
def processes(*commands: list[str]) -> Iterator[list[Process]]:
    started = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in commands]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 60, pause: float = 0.05) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(pause)


@contextmanager
def two_workers(folder: Path) -> Iterator[tuple[str, list[Process]]]:
    """The address of the scheduler, and its workers of one thread each."""
    from distributed import Client
    from distributed.utils import json_load_robust

    file = folder / "scheduler.json"
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", *common, "--port", "0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", *common, "--nthreads", "1", "--no-nanny"]
    worker += ["--local-directory", str(folder)]
    with processes(scheduler):
        wait_until(file.exists)
        with processes(worker, worker) as workers:
            address = json_load_robust(file, timeout=60)["address"]  # it may exist before it is written
            with Client(address) as client:
                wait_until(lambda: len(client.ncores()) == 2)
            yield address, workers
