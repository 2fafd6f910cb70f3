"""Run a function in several processes that are connected as `accelerate launch` connects them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from branchout.errors import BranchoutError
from branchout.training import processes

Found = TypeVar("Found")


def in_processes(count: int, function: Callable[[], Found]) -> list[Found]:
    """What the function returns in each of `count` processes, where it computes in double precision.

    `None` where it was interrupted, and the error of a process that noticed.

    In single precision a rounding error that turns the sign of one activation before a ReLU grows, within a few steps
    of a training from scratch, to weights that differ in their first digit.
    """
    context = multiprocessing.get_context("fork")  # a fork need not import torch again
    port = free_port()
    pairs = [context.Pipe(duplex=False) for _ in range(count)]
    started = [
        context.Process(target=_one, args=(rank, count, port, function, pairs[rank][1]), daemon=True)
        for rank in range(count)
    ]
    for process, (_, writing) in zip(started, pairs, strict=True):
        process.start()
        writing.close()
    found: list[Found] = []
    for rank, (reading, _) in enumerate(pairs):
        assert reading.poll(360), f"process {rank} does not answer"
        worked, value = pickle.loads(reading.recv_bytes())
        assert worked, f"process {rank}:\n{value}"
        found.append(value)
    for process in started:
        process.join()
    return found


def _one(rank: int, count: int, port: int, function: Callable[[], object], to: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ.update(places, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    try:
        processes.begin()
        processes.join(torch.device("cpu"))
        to.send_bytes(pickle.dumps((True, function())))  # torch would send tensors through shared memory
        processes.wait()
    except KeyboardInterrupt:
        to.send_bytes(pickle.dumps((True, None)))
    except BranchoutError as error:
        to.send_bytes(pickle.dumps((True, error)))
    except BaseException:
        to.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        to.close()
        os._exit(0)  # without what pytest would do at the end


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
