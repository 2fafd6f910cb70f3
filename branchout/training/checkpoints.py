"""Training checkpoints: module state, optimiser state and losses in one safetensors file, written after every epoch.

A file that cannot be used (truncated, changed, of another network) is ignored with a notice, and training starts over.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from branchout.files import atomic_write
from branchout.training.optimisation import Optimisation, settings_dict

OPTIMISER_STATE = {
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
    held_out: Sequence[float] = (),
) -> None:
    tensors = {f"state/{key}": value.detach().contiguous() for key, value in modules.state_dict().items()}
    for number, parameter in enumerate(parameters):
        for name, key in OPTIMISER_STATE[optimisation.optimiser].items():
            tensors[f"{name}/{number}"] = optimiser.state[parameter][key].contiguous()
    about = {"losses": json.dumps(list(losses)), "settings": json.dumps(settings_dict(optimisation))}
    about |= {"held_out": json.dumps(list(held_out))} if held_out else {}
    with atomic_write(path) as partial:
        save_file(tensors, partial, {**about, "checksum": _checksum(tensors, about["losses"])})


def resume(
    path: Path,
    modules: nn.Module,
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    optimisation: Optimisation,
) -> tuple[list[float], list[float]]:
    """Load a checkpoint; returns the losses of its epochs, and those on held-out images where they were computed.

    Both are empty if there is no usable checkpoint of the same settings.
    """
    if not path.exists():
        return [], []
    try:
        tensors, about = _read(path)
        if json.loads(about["settings"]) != settings_dict(optimisation):
            return [], []
        losses = _losses(about["losses"], optimisation.epochs)
        held_out = _losses(about.get("held_out", "[]"), optimisation.epochs)
        checksum = _checksum(tensors, about["losses"])
        if about.get("checksum", checksum) != checksum:  # older files have none
            raise ValueError("its checksum differs")
        state = _matching(tensors, modules.state_dict(), "state/")
        remembered = _optimiser_state(tensors, parameters, optimisation)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        logging.getLogger(__name__).warning("Checkpoint %s cannot be used (%s). Training starts over.", path, error)
        return [], []
    modules.load_state_dict(state)
    for parameter, entries in zip(parameters, remembered, strict=True):
        optimiser.state[parameter].update(entries)
    return losses, held_out


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    if not path.is_file():
        raise ValueError("it is not a regular file")
    with safe_open(path, "pt") as file:
        about: Mapping[str, str] = file.metadata() or {}
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (not a dict)


def _losses(text: str, epochs: int) -> list[float]:
    losses = json.loads(text)
    if not isinstance(losses, list) or len(losses) > epochs or not all(isinstance(x, float) for x in losses):
        raise ValueError("its losses are not a list of numbers")
    if not all(math.isfinite(x) for x in losses):
        raise ValueError("its losses are not finite")
    return losses


def _matching(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of `like` from a file, if it has exactly these, with their shapes and types."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if found.keys() != like.keys():
        raise ValueError("it belongs to another network")
    for name, tensor in found.items():
        _check(name, tensor, like[name])
    return found


def _optimiser_state(
    tensors: Mapping[str, Tensor], parameters: Sequence[nn.Parameter], optimisation: Optimisation
) -> list[dict[str, Tensor]]:
    """What the optimiser kept of each parameter."""
    remembered = []
    for number, parameter in enumerate(parameters):
        entries = {}
        for name, key in OPTIMISER_STATE[optimisation.optimiser].items():
            kept = tensors[f"{name}/{number}"]
            _check(f"{name}/{number}", kept, torch.zeros(()) if name == "step" else parameter)
            # In the parameter's own memory layout, which fused optimisers require; a count of steps has none.
            like = kept.to(parameter.device) if name == "step" else parameter.detach()
            entries[key] = torch.empty_like(like).copy_(kept)
        remembered.append(entries)
    return remembered


def _check(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {tuple(like.shape)}")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(f"{name} has numbers that are not finite")


def _checksum(tensors: Mapping[str, Tensor], losses: str) -> str:
    value = zlib.crc32(losses.encode())
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        value = zlib.crc32(data.tobytes(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
