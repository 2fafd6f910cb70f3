"""The loop that trains every network: precision, schedule, progress, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from branchout.errors import BranchoutError, unknown
from branchout.progress import Event as Event
from branchout.progress import OnProgress as OnProgress
from branchout.progress import silent as silent
from branchout.training import checkpoints, processes
from branchout.training.cuda_graphs import EagerStep, Split, fastest
from branchout.training.optimisation import Optimisation

_log = logging.getLogger(__name__)
Batch = TypeVar("Batch")


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 for networks on a GPU that computes in it (a T4 does not), or as `accelerate launch` asks.

    Heads and losses stay in float32: eight bits are too few for logits up to 16.
    """
    low = processes.precision() == "bf16"
    if processes.precision() is None:
        low = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, torch.bfloat16, enabled=low)


LONG_TRAINING = 1000
"""Steps from which on cuDNN's measuring pays."""


@contextmanager
def fastest_convolutions(device: torch.device, steps: int) -> Iterator[None]:
    """Let cuDNN measure its algorithms and use the fastest: shapes stay the same during training.

    Measuring takes seconds, which a short training does not win back. Another run may measure another one as the
    fastest, so repeatable training goes without.
    """
    before = torch.backends.cudnn.benchmark
    pays = device.type == "cuda" and steps >= LONG_TRAINING
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled() and (before or pays)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def seed_for(*parts: int) -> int:
    """One seed from several numbers, such as the run's seed and the epoch; neighbours are unrelated."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


MILESTONES = {
    "thirds": (0.0, 0.1, (1 / 3, 2 / 3)),
    "half": (0.0, 0.1, (1 / 2,)),
    "icarl": (0.0, 0.2, (49 / 70, 63 / 70)),
    "der": (10 / 170, 0.1, (110 / 170, 130 / 170)),
}
"""Schedules in steps: the share of a linear warm-up, and the factor at each milestone. The last two are those of the
published experiments of iCaRL and DER."""
WARM_UP = {"cosine": 0.05, "plain-cosine": 0.0}


def learning_rate(optimisation: Optimisation, progress: float) -> float:
    """The rate at `progress` (0 to 1) of the whole training."""
    lr, schedule = optimisation.lr, optimisation.schedule
    if schedule == "constant":
        return lr
    if schedule in MILESTONES:
        warmup, factor, milestones = MILESTONES[schedule]
        if progress < warmup:
            return lr * progress / warmup
        return lr * factor ** sum(progress + 1e-9 >= each for each in milestones)
    warmup = WARM_UP[schedule]
    if progress < warmup:
        return lr * progress / warmup
    return lr * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


def warm_up_epochs(optimisation: Optimisation) -> int:
    """How many of its epochs are the warm-up."""
    schedule = optimisation.schedule
    share = MILESTONES[schedule][0] if schedule in MILESTONES else WARM_UP.get(schedule, 0.0)
    return round(share * optimisation.epochs)


def optimiser_for(
    parameters: Sequence[nn.Parameter], optimisation: Optimisation, device: torch.device
) -> torch.optim.Optimizer:
    fused = device.type == "cuda"
    decay = optimisation.weight_decay
    if optimisation.optimiser == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=optimisation.lr,
            momentum=0.9,
            weight_decay=decay,
            nesterov=optimisation.nesterov,
            fused=fused,
        )
    if optimisation.optimiser == "adamw":
        # No weight decay for biases and normalisation; position embeddings are matrices and have it.
        groups = [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": decay},
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        return torch.optim.AdamW(filled, lr=optimisation.lr, fused=fused)
    raise unknown("optimiser", optimisation.optimiser, checkpoints.OPTIMISER_STATE)


def fit(
    modules: nn.Module,
    parameters: Sequence[nn.Parameter],
    epoch_batches: Callable[[int], Iterable[Batch]],
    steps_per_epoch: int,
    loss_of: Callable[[Batch], Tensor],
    optimisation: Optimisation,
    *,
    device: torch.device,
    work: str = "Training",
    checkpoint: Path | None = None,
    save_every: int = 1,
    held_out_loss: Callable[[], float] | None = None,
    split: Split[Batch] | None = None,
    on_progress: OnProgress = silent,
) -> list[float]:
    """Train `parameters` and return the mean loss of every epoch.

    `epoch_batches(e)` yields epoch e's batches, always the same ones, so that a resumed run sees what an uninterrupted
    one would have seen. `modules` holds all state that training changes; a checkpoint keeps it after every `save_every`
    epochs. With `held_out_loss`, training ends in its last third, when the learning rate is lowest, once that loss no
    longer improves. Where several processes train, a batch is this one's part, and `loss_of` the loss of the whole
    batch. `split` divides a batch where gradients are accumulated, or where a GPU has too little memory.
    """
    optimiser = optimiser_for(parameters, optimisation, device)
    losses, held_out = (
        ([], []) if not checkpoint else checkpoints.resume(checkpoint, modules, parameters, optimiser, optimisation)
    )
    processes.check_same((losses, held_out), "checkpoint")
    if losses and processes.is_main():
        _log.info("%s resumes after epoch %d of %d.", work, len(losses), optimisation.epochs)
    loss_of = processes.shared_loss(modules, loss_of, optimisation.batch)
    steps = steps_per_epoch * optimisation.epochs
    most_norm = 1.0 if optimisation.optimiser == "adamw" else None
    step_of = fastest(EagerStep(modules, parameters, optimiser, loss_of, most_norm, split), device, steps)
    with fastest_convolutions(device, steps):
        for epoch in range(len(losses), optimisation.epochs):
            if stopped_improving(held_out):
                break
            total = torch.zeros((), device=device)
            count = 0
            for step, batch in enumerate(epoch_batches(epoch)):
                progress = (epoch + step / steps_per_epoch) / optimisation.epochs
                total += step_of(batch, learning_rate(optimisation, progress)).float()
                count += 1
            losses.append(total.item() / max(count, 1))
            if not (math.isfinite(losses[-1]) and all(bool(torch.isfinite(p).all()) for p in parameters)):
                raise diverged(epoch + 1, epoch - epoch % save_every, checkpoint)
            if held_out_loss is not None and 3 * (epoch + 1) > 2 * optimisation.epochs:
                held_out.append(processes.from_main(held_out_loss()))
            if checkpoint and processes.is_main() and (epoch + 1) % save_every == 0:
                checkpoints.save(checkpoint, modules, parameters, optimiser, optimisation, losses, held_out)
            last = epoch + 1 if stopped_improving(held_out) else optimisation.epochs
            on_progress(Event(work, epoch + 1, last, {"loss": losses[-1]}))
            if last < optimisation.epochs and processes.is_main():
                _log.info(
                    "%s ended after %d of %d epochs: the loss on held-out images no longer falls.",
                    work, last, optimisation.epochs,
                )  # fmt: skip
    optimiser.zero_grad(set_to_none=True)  # what was trained lives on; its gradients would, too
    return losses


PATIENCE = 2
"""Epochs without a better loss on held-out images after which training ends."""


def stopped_improving(losses: Sequence[float]) -> bool:
    """Whether none of the last epochs was better than those before by a thousandth."""
    return len(losses) > PATIENCE and min(losses[-PATIENCE:]) > 0.999 * min(losses[:-PATIENCE])


def diverged(epoch: int, saved: int, checkpoint: Path | None) -> BranchoutError:
    """The error for a loss, or weights, that are not finite numbers; `saved` is the last epoch in `checkpoint`."""
    kept = f" The state after epoch {saved} is kept in {checkpoint}." if checkpoint and saved else ""
    return BranchoutError(
        f"Training stopped in epoch {epoch}: the loss is not a finite number.{kept} Try a lower learning rate, and "
        "check the images for blank or damaged ones and wrong labels."
    )
