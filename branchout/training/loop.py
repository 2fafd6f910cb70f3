"""The one training loop: precision, schedule, progress, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from branchout.errors import unknown
from branchout.files import atomic_write
from branchout.training.optimisation import Optimisation, settings_dict

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Event:
    """Something a watcher may show: how far a piece of work is, and the figures that matter."""

    work: str
    done: int
    total: int
    figures: dict[str, float] = field(default_factory=dict)


Report = Callable[[Event], None]


def silent(_: Event) -> None:
    """Nobody watches."""


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(device: torch.device) -> torch.autocast:
    """Networks run in bfloat16 on a GPU. Heads and losses do not: its eight bits are too few for logits up to 16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def fastest_convolutions(device: torch.device) -> Iterator[None]:
    """Let cuDNN try its ways of computing each convolution and keep the fastest: shapes stay the same in a training."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def seed_for(*parts: int) -> int:
    """One seed from several numbers, such as the run's seed and the epoch; neighbours are unrelated."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def learning_rate(optimisation: Optimisation, progress: float) -> float:
    """The rate at `progress` (0 to 1) of the whole training."""
    if optimisation.schedule == "constant":
        return optimisation.lr
    if optimisation.schedule == "thirds":
        return optimisation.lr * 0.1 ** min(int(progress * 3 + 1e-9), 2)
    warmup = 0.05
    if progress < warmup:
        return optimisation.lr * progress / warmup
    return optimisation.lr * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


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
        # Biases and normalisations are not pulled to zero: with so strong a decay they would miss their work. Positions
        # are, as a table of them is a matrix.
        groups = [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": decay},
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        return torch.optim.AdamW(filled, lr=optimisation.lr, fused=fused)
    raise unknown("optimiser", optimisation.optimiser, REMEMBERED)


def fit(
    modules: nn.Module,
    parameters: Sequence[nn.Parameter],
    epoch_batches: Callable[[int], Iterable[Batch]],
    steps_per_epoch: int,
    loss_of: Callable[[Batch], Tensor],
    optimisation: Optimisation,
    *,
    device: torch.device,
    work: str = "train",
    checkpoint: Path | None = None,
    report: Report = silent,
) -> list[float]:
    """Train `parameters` and return the mean loss of every epoch.

    `epoch_batches(e)` yields epoch e's batches, always the same ones, so that a run resumed after a kill sees what an
    uninterrupted one would have seen. `modules` holds all state that training changes; it is what a checkpoint keeps.
    """
    optimiser = optimiser_for(parameters, optimisation, device)
    clipped = optimisation.optimiser == "adamw"
    losses = resume(checkpoint, modules, parameters, optimiser, optimisation) if checkpoint else []
    with fastest_convolutions(device):
        for epoch in range(len(losses), optimisation.epochs):
            total = torch.zeros((), device=device)
            count = 0
            for step, batch in enumerate(epoch_batches(epoch)):
                progress = (epoch + step / steps_per_epoch) / optimisation.epochs
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(optimisation, progress)
                loss = loss_of(batch)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                if clipped:
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                total += loss.detach().float()
                count += 1
            losses.append(total.item() / max(count, 1))
            if checkpoint:
                save(checkpoint, modules, parameters, optimiser, optimisation, losses)
            report(Event(work, epoch + 1, optimisation.epochs, {"loss": losses[-1]}))
    return losses


# Checkpoints: tensors and JSON in one safetensors file, replaced in one move, so that a kill at any moment leaves the
# last whole epoch.

REMEMBERED = {
    "sgd": {"momentum": "momentum_buffer"},
    "adamw": {"step": "step", "first": "exp_avg", "second": "exp_avg_sq"},
}
"""What an optimiser keeps of each parameter: its name in a checkpoint, and torch's."""


def save(
    path: Path,
    modules: nn.Module,
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    optimisation: Optimisation,
    losses: Sequence[float],
) -> None:
    tensors = {f"state/{key}": value.detach().contiguous() for key, value in modules.state_dict().items()}
    for number, parameter in enumerate(parameters):
        for name, key in REMEMBERED[optimisation.optimiser].items():
            tensors[f"{name}/{number}"] = optimiser.state[parameter][key].contiguous()
    about = {"losses": json.dumps(list(losses)), "settings": json.dumps(settings_dict(optimisation))}
    with atomic_write(path) as partial:
        save_file(tensors, partial, about)


def resume(
    path: Path,
    modules: nn.Module,
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    optimisation: Optimisation,
) -> list[float]:
    """Take up training where the checkpoint left it; one of other settings, or one cut short, is not used."""
    try:
        opened = safe_open(path, "pt")
    except (OSError, SafetensorError):
        return []
    with opened as file:
        about = file.metadata()
        if not about or json.loads(about["settings"]) != settings_dict(optimisation):
            return []
        names = [name for name in file.keys() if name.startswith("state/")]  # noqa: SIM118 (not a dict)
        state = {name.removeprefix("state/"): file.get_tensor(name) for name in names}
        modules.load_state_dict(state)
        for number, parameter in enumerate(parameters):
            for name, key in REMEMBERED[optimisation.optimiser].items():
                kept = file.get_tensor(f"{name}/{number}")
                # In the parameter's own memory layout, which a fused optimiser insists on; a count of steps has none.
                like = parameter.detach() if kept.shape == parameter.shape else kept.to(parameter.device)
                optimiser.state[parameter][key] = torch.empty_like(like).copy_(kept)
    losses: list[float] = json.loads(about["losses"])
    return losses
