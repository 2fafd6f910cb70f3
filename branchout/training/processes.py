"""The processes of one run, started by `accelerate launch`: which one this is, and what they exchange.

All processes run the same program with the same images and random numbers. Of each batch, process r of n computes the
rows r, r + n, r + 2n, …; features are gathered, so that every process computes the loss of the whole batch, and
gradients are averaged. So the model is that of one process, up to rounding. Only the first process writes files.

Processes take part after `begin`, which the commands for several processes call. In every other program nothing is
exchanged, whatever a launcher has put into its environment, and neither accelerate nor torch.distributed is imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from branchout.errors import BranchoutError, LostProcess, first_line
from branchout.labels import Ints

Value = TypeVar("Value")
PATIENCE = timedelta(hours=12)
"""How long a process waits for the others, of which one may decode images or measure another exemplar seed. One that
has ended is noticed at once."""
_independent: ContextVar[bool] = ContextVar("independent", default=False)


@dataclass(frozen=True)
class Launch:
    """What `accelerate launch` asks of this process."""

    count: int = 1
    rank: int = 0
    local_rank: int = 0
    precision: str | None = None
    """`no` or `bf16`; None chooses by the device."""
    accumulation: int = 1
    """Into how many parts each batch is divided, whose gradients are added."""


_launch = Launch()


def begin(*, together: bool = True, alike: bool = False) -> None:
    """Take part in the run that a launcher has described in the environment; `together` with its other processes.

    `alike` asks that everything is computed as without a launcher, so that precision and accumulation are not chosen.
    """
    global _launch
    get = os.environ.get
    precision = get("ACCELERATE_MIXED_PRECISION")
    accumulation = get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if precision not in (None, "no", "bf16"):
        raise BranchoutError(
            f"Mixed precision {precision!r} is not supported. Use: accelerate launch --mixed_precision bf16 … or no"
        )
    if not accumulation.isdecimal() or int(accumulation) < 1:
        raise BranchoutError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {accumulation!r}; expected a number of parts of a batch, like 2"
        )
    if alike and (precision == "bf16" or int(accumulation) > 1):
        raise BranchoutError(
            "`branchout bench` measures rows as one process does: use --mixed_precision no, which keeps the precision "
            "of one process there, and unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )
    _launch = Launch(
        count=int(get("WORLD_SIZE", "1")) if together else 1,
        rank=int(get("RANK", "0")) if together else 0,
        local_rank=int(get("LOCAL_RANK", "0")) if together else 0,
        precision=None if alike else precision,
        accumulation=int(accumulation),
    )


def count() -> int:
    return 1 if _independent.get() else _launch.count


def rank() -> int:
    return _launch.rank if count() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine."""
    return _launch.local_rank if count() > 1 else 0


def precision() -> str | None:
    """The precision that was asked for: `no` or `bf16`; None chooses by the device."""
    return _launch.precision


def accumulation() -> int:
    """Into how many parts each batch is divided, whose gradients are added."""
    return _launch.accumulation


def is_main() -> bool:
    """Whether this process writes the files and prints."""
    return rank() == 0


def part() -> tuple[int, int]:
    """This process of how many."""
    return rank(), count()


@contextmanager
def independent(alone: bool = True) -> Iterator[None]:
    """Inside, this process works as if it were alone: it exchanges nothing with the others; or it does so again."""
    token = _independent.set(alone)
    try:
        yield
    finally:
        _independent.reset(token)


def join(device: torch.device) -> None:
    """Connect the processes: over NCCL for GPUs, over gloo for CPUs."""
    if precision() == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BranchoutError(f"{torch.cuda.get_device_name(device)} has no bfloat16. Use: --mixed_precision no")
    if count() == 1:
        return
    if find_spec("accelerate") is None:
        raise BranchoutError('Several processes need accelerate. Install it: pip install "branchout[cluster]"')
    from accelerate import PartialState

    PartialState(cpu=device.type == "cpu", timeout=PATIENCE)


def choose_gpu() -> None:
    """Use a GPU of its own, or share one where there are fewer GPUs than processes."""
    if count() > 1 and torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())


def wait() -> None:
    """Wait until all processes are here."""
    from_main(None)


def from_main(value: Value) -> Value:
    """What the first process has computed, in every process."""
    if count() == 1:
        return value
    shared = [value]
    torch.distributed.broadcast_object_list(shared)
    return shared[0]


def check_same(value: object, what: str) -> None:
    """Raise if another value than that of the first process was found, for example on another machine's disk."""
    if from_main(value) != value:
        raise BranchoutError(
            f"Process {rank()} of {count()} found another {what} than the first process. All machines must see the "
            "same files at the same paths."
        )


def from_each(value: Value) -> list[Value]:
    """What each process has computed, in every process."""
    found = [value] * count()
    if count() > 1:
        torch.distributed.all_gather_object(found, value)
    return found


@contextmanager
def first_on_machine() -> Iterator[None]:
    """Run the block in the first process of each machine, then in the others, which find its files."""
    if local_rank() > 0:
        wait()
    yield
    if count() > 1 and local_rank() == 0:
        wait()


def sum_up(tensor: Tensor) -> Tensor:
    """Replace a tensor by its sum over all processes."""
    if count() > 1:
        # Collective operations want dense memory in order, which that of a channels-last tensor is after a permutation.
        ordered = tensor if tensor.is_contiguous() else tensor.permute(0, 2, 3, 1)
        torch.distributed.all_reduce(ordered)
    return tensor


def never_empty(batch: Tensor) -> Tensor:
    """The batch, or one blank image where this process has none: some networks cannot compute nothing."""
    return batch if len(batch) else batch.new_zeros(1, *batch.shape[1:])


def gather(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of all processes, in the order in which one process has them.

    `rows` are this process's part of batches of `sizes` images, joined. Gradients of the loss, which every process
    computes from all rows, return to the rows of this one.
    """
    if count() == 1:
        return rows
    ends = np.cumsum(sizes)
    own = [np.arange(end - size + rank(), end, count()) for end, size in zip(ends, sizes, strict=True)]
    places = torch.from_numpy(np.concatenate(own)).to(rows.device)
    whole: Tensor = _Gather.apply(rows, places, int(ends[-1]))
    return whole


@dataclass(frozen=True)
class Rows:
    """Some of the rows of a batch."""

    own: Ints
    """Their positions among this process's rows."""
    whole: Ints
    """Those of all processes, as positions in the whole batch."""
    sizes: list[int]
    """How many of each section of the batch, over all processes."""


def divided(sizes: Sequence[int], parts: int) -> list[Rows]:
    """A batch of sections of `sizes` images, in `parts` of about equal size that have images of every section.

    Each part is divided among the processes as a batch is: position p belongs to process p modulo n.
    """
    if min(sizes) < parts * count():
        raise BranchoutError(
            f"A batch has {min(sizes)} images, too few for {parts} parts on {count()} processes. Start fewer "
            "processes, or lower ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )
    found = []
    for part in range(parts):
        own, whole, own_start, start = [], [], 0, 0
        for size in sizes:
            chosen = np.flatnonzero(np.arange(size) // count() % parts == part)
            own.append(own_start + chosen[chosen % count() == rank()] // count())
            whole.append(start + chosen)
            own_start, start = own_start + len(range(rank(), size, count())), start + size
        found.append(Rows(np.concatenate(own), np.concatenate(whole), [len(each) for each in whole]))
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, own: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(own)
        return sum_up(rows.new_zeros(total, *rows.shape[1:]).index_copy_(0, own, rows))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (own,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient[own] * count(), None, None  # gradients are averaged over the processes later


def shared_loss(modules: nn.Module, loss_of: Callable[[Value], Tensor], batch: int) -> Callable[[Value], Tensor]:
    """The loss of a batch, with gradients averaged over the processes and BatchNorm over the whole batch."""
    if count() == 1:
        return loss_of
    if batch < count():
        raise BranchoutError(f"A batch has {batch} images, but there are {count()} processes. Start {batch} or fewer.")
    from branchout.training.batch_norm import WholeBatchNorm

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modules_trained = modules

        def forward(self, batch: Value) -> Tensor:
            with WholeBatchNorm():
                return loss_of(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch call broadcast_buffers by another name
        return nn.parallel.DistributedDataParallel(Loss(), broadcast_buffers=False, static_graph=True)


@contextmanager
def connected() -> Iterator[None]:
    """Inside, a process that has ended while this one waited for it is explained."""
    try:
        yield
    except RuntimeError as error:
        if count() == 1 or not any(word in str(error) for word in ("gloo", "NCCL", "Connection", "TCPStore")):
            raise
        raise LostProcess(
            f"Another process of this run has ended, so process {rank()} of {count()} stops too. Run the same command "
            f"again, with any number of processes, to resume. ({first_line(error)[:160]})"
        ) from error
