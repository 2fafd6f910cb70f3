"""Where jobs run: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from branchout.api.bulk_prediction import dask_client


@contextmanager
def executor_of(workers: int, dask: str | None) -> Iterator[tuple[Executor, int]]:
    """Local processes or a Dask cluster, and how many jobs it runs at once."""
    if dask is None:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                yield pool, workers
            except KeyboardInterrupt:
                # They would finish their rows otherwise. Rows that are not written are missing, nothing more.
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return
    with dask_client(dask) as client, client.get_executor() as cluster:
        yield cluster, len(client.ncores())  # workers; one may have several threads, and runs one job at a time
