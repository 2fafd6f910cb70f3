"""One step of training: forward, backward and update, launched kernel by kernel or recorded as one CUDA graph.

A step of a small network is hundreds of short kernels, and starting them one by one takes a GPU longer than running
them. A CUDA graph starts all of them at once. It can only repeat what was recorded: the same kernels on the same
memory. So batches are copied into fixed buffers, the learning rate is a tensor, and a step that cannot be repeated
(it waits for the device, draws random numbers on the host, has batches of several shapes) is not recorded.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from branchout.errors import BranchoutError, first_line
from branchout.training import processes
from branchout.training.out_of_memory import empty_cache, out_of_memory

Batch = TypeVar("Batch")

FEWEST_STEPS = 100
"""Steps from which on recording pays; it takes about as long as ten of them."""
WARM_UP = 3
"""Steps before the recording: the first ones allocate the optimiser's state and choose algorithms."""
CHECKED = 4
"""Repeated steps whose loss is compared with that of an ordinary forward pass."""
TOLERANCE = 0.01
"""By how much of its value the loss of a repeated step may differ."""
MOST_PARTS = 16
"""Parts of a batch; with fewer images, BatchNorm has too few."""

_log = logging.getLogger(__name__)

Split = Callable[[Batch, int], Iterable[tuple[float, Batch]]]
"""Divides a batch into so many parts; each has the weight of its loss in that of the whole batch."""


@dataclass(eq=False)
class EagerStep(Generic[Batch]):
    """A step launched kernel by kernel.

    Where gradients are accumulated, and where a GPU has too little memory for a batch, it is computed in parts.
    """

    modules: nn.Module
    parameters: Sequence[nn.Parameter]
    optimiser: torch.optim.Optimizer
    loss_of: Callable[[Batch], Tensor]
    most_norm: float | None = None
    """The norm that gradients are clipped to."""
    split: Split[Batch] | None = None

    def __post_init__(self) -> None:
        self.may_divide = self.split is not None
        self.parts = 1 if self.split is None else processes.accumulation()

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        """Update the parameters; returns the loss, which is valid until the next step."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        return self.update(batch)

    def update(self, batch: Batch) -> Tensor:
        first: RuntimeError | None = None
        while True:
            try:
                loss = self.backward(batch)
                break
            except RuntimeError as error:
                # Several processes would have to agree on it.
                can_divide = self.may_divide and processes.count() == 1 and self.parts < MOST_PARTS
                if not out_of_memory(error) or not can_divide:
                    raise
                first = first or error.with_traceback(None)  # its frames hold tensors of the failed step
            except BranchoutError:
                if first is None:
                    raise
                self.parts //= 2  # the batch has too few images for more parts
                raise first from None
            self.parts *= 2
            empty_cache()
            _log.warning(
                "The GPU has too little memory for a whole batch: each is computed in %d parts from now on. BatchNorm "
                "uses the images of one part.",
                self.parts,
            )
        if self.most_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.most_norm)
        self.optimiser.step()
        return loss

    def backward(self, batch: Batch) -> Tensor:
        """Compute the gradients of a batch; returns its loss."""
        if self.parts == 1 or self.split is None:
            loss = self.loss_of(batch)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        self.optimiser.zero_grad(set_to_none=True)
        losses = []
        for weight, part in self.split(batch, self.parts):
            loss = weight * self.loss_of(part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()


class CudaRecorder:
    """Records a step and repeats it, on a stream of its own, as torch's page on CUDA graphs describes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def warming_up(self, *, strict: bool) -> Iterator[None]:
        """A context for steps before the recording. If `strict`, waiting for the device is an error."""
        before = torch.cuda.get_sync_debug_mode()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # it is "a prototype feature"
                torch.cuda.set_sync_debug_mode("error" if strict else before)
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
            current.wait_stream(self.stream)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record `work` without changing any state; returns what repeats it and gives its result."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generator = torch.cuda.default_generators[index]
        state = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread may do nothing else meanwhile: others may be filling pinned memory with images.
            # The outer stream is left even where the recording fails to end.
            with (
                torch.cuda.stream(self.stream),
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
            ):
                result = work()
        except RuntimeError:
            generator.graphsafe_set_state(state)  # the recorded one would refuse to draw any more
            raise

        def repeat() -> Tensor:
            graph.replay()
            return result

        return repeat


@dataclass(eq=False, kw_only=True)
class GraphStep(EagerStep[Batch]):
    """A step that is recorded once it is warm, and repeated; eager where that is not possible."""

    recorder: CudaRecorder
    device: torch.device
    refused: bool = False
    steps: int = 0
    form: object = None
    fixed: Batch | None = None
    repeat: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rate = torch.zeros((), device=self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        self.rate.fill_(rate)
        form = form_of(batch)
        if self.fixed is None:
            self.form, self.fixed = form, mapped(batch, lambda x: torch.empty_like(x) if isinstance(x, Tensor) else x)
        if self.refused or (self.repeat and form != self.form):
            return self.update(batch)
        if form != self.form:
            return self.refuse("batches differ in shape", batch)
        for fixed, fresh in zip(tensors_of(self.fixed), tensors_of(batch), strict=True):
            fixed.copy_(fresh)
        with without_autocast_cache():
            return self.warm_up(batch) if self.steps < WARM_UP else self.repeated(batch)

    def warm_up(self, batch: Batch) -> Tensor:
        """An ordinary step on the fixed buffers. All but the first may not wait for the device."""
        assert self.fixed is not None
        self.steps += 1
        kept, random = self.state(), torch.get_rng_state()
        try:
            with self.recorder.warming_up(strict=self.steps > 1):
                loss = self.update(self.fixed)
        except RuntimeError as error:
            self.restore(kept)
            return self.refuse(f"the step cannot be recorded ({first_line(error)})", batch)
        if not torch.equal(random, torch.get_rng_state()):
            self.refused = True
            _log.info("No CUDA graph: the loss draws random numbers on the host.")
        return loss.clone()

    def repeated(self, batch: Batch) -> Tensor:
        """A recorded step; recorded now if it is the first."""
        if self.repeat is None:
            self.optimiser.zero_grad(set_to_none=True)
            divides, self.may_divide = self.may_divide, False  # a recording needs more memory than a step
            try:
                self.repeat = self.recorder.record(lambda: self.update(self.fixed))  # type: ignore[arg-type]
            except RuntimeError as error:
                reason = f"the step cannot be recorded ({first_line(error)})"
            finally:
                self.may_divide = divides
            if self.repeat is None:
                return self.refuse(reason, batch)
            _log.info("CUDA graph: a whole step is launched at once, because its batches have one shape.")
        self.steps += 1
        return self.checked(batch) if self.steps <= WARM_UP + CHECKED else self.repeat()

    def checked(self, batch: Batch) -> Tensor:
        """A repeated step, if its loss is that of an ordinary one: what Python decides in a loss is not recorded."""
        assert self.repeat is not None
        kept = self.state()
        # Without gradients: the recording holds the memory of a whole step already.
        with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            expected = float(self.loss_of(batch))
        self.restore(kept)
        loss = self.repeat()
        if math.isclose(float(loss), expected, rel_tol=TOLERANCE, abs_tol=1e-4) or not math.isfinite(expected):
            return loss
        found = float(loss)
        self.restore(kept)
        return self.refuse(f"a recorded step has the loss {found:.4g}, an ordinary one {expected:.4g}", batch)

    def refuse(self, reason: str, batch: Batch) -> Tensor:
        """From now on eager steps; the first of them."""
        self.refused, self.repeat = True, None
        _log.info("No CUDA graph: %s.", reason)
        return self.update(batch)

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """All that a step changes, with copies."""
        kept = [each for of in self.optimiser.state.values() for each in of.values() if isinstance(each, Tensor)]
        kept += [*self.parameters, *self.modules.parameters(), *self.modules.buffers()]
        return [(tensor, tensor.detach().clone()) for tensor in kept]

    @torch.no_grad()
    def restore(self, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in kept:
            tensor.copy_(value)


def fastest(step: EagerStep[Batch], device: torch.device, steps: int) -> EagerStep[Batch]:
    """The faster kind of this step for a training of so many `steps`; the reason for the choice is logged."""
    if device.type != "cuda":
        return step
    reason = ""
    if steps < FEWEST_STEPS:
        reason = f"{steps} steps are too few to win back the time of recording one"
    elif processes.count() > 1:
        reason = "several processes train together"
    elif processes.accumulation() > 1:
        reason = "gradients are accumulated"
    if reason:
        _log.info("No CUDA graph: %s.", reason)
        return step
    settings = {each.name: getattr(step, each.name) for each in fields(step)}
    return GraphStep(**settings, recorder=CudaRecorder(device), device=device)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """No weights in low precision from outside a recording may be used in it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def mapped(batch: Batch, change: Callable[[object], object]) -> Batch:
    """The same tuples, lists and dataclasses with other leaves."""
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(each, change) for each in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{each.name: mapped(getattr(batch, each.name), change) for each in fields(batch)})
    return change(batch)  # type: ignore[return-value]


def tensors_of(batch: object) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(batch, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


def form_of(batch: object) -> object:
    """What must be the same in all batches of a recorded step: shapes, and everything that is not a tensor."""
    return mapped(batch, lambda x: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x)
