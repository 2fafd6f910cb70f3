"""Training checkpoints: module state, optimiser state and losses in one safetensors file, written after an epoch.

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

from branchout.errors import BranchoutError
from branchout.files import atomic_write
from branchout.model.weights import check_finite, check_shapes
from branchout.training.optimisation import Optimisation, settings_dict

_log = logging.getLogger(__name__)
UNUSABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError, BranchoutError)
"""What reading a damaged file raises."""
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
            _log.info("%s was made with other settings. Training starts over.", path)
            return [], []
        losses = _losses(about["losses"], optimisation.epochs)
        held_out = _losses(about.get("held_out", "[]"), optimisation.epochs)
        checksum = _checksum(tensors, about["losses"])
        if about.get("checksum", checksum) != checksum:  # older files have none
            raise ValueError("its checksum differs")
        expected = _expected(modules, parameters, optimisation)
        check_shapes(expected, tensors, "it belongs to another network")
        check_finite(tensors, path.name)
        if any(tensors[name].dtype != like.dtype for name, like in expected.items()):
            raise ValueError("its numbers have another precision")
    except UNUSABLE as error:
        _log.warning("Checkpoint %s cannot be used (%s). Training starts over.", path, error)
        return [], []
    modules.load_state_dict({key: tensors[f"state/{key}"] for key in modules.state_dict()})
    for number, parameter in enumerate(parameters):
        for name, key in OPTIMISER_STATE[optimisation.optimiser].items():
            kept = tensors[f"{name}/{number}"]
            # In the parameter's own memory layout, which fused optimisers require; a count of steps has none.
            like = kept.to(parameter.device) if name == "step" else parameter.detach()
            optimiser.state[parameter][key] = torch.empty_like(like).copy_(kept)
    return losses, held_out


def epochs_done(path: Path | None, epochs: int) -> int:
    """How many of these epochs a checkpoint holds, by its header alone: `resume` checks the rest. 0 without one."""
    if path is None or not path.is_file():
        return 0
    try:
        with safe_open(path, "pt") as file:
            return len(_losses(file.metadata()["losses"], epochs))
    except UNUSABLE:
        return 0


def _expected(modules: nn.Module, parameters: Sequence[nn.Parameter], optimisation: Optimisation) -> dict[str, Tensor]:
    """Tensors of the names, shapes and types that a checkpoint must have."""
    expected = {f"state/{key}": value for key, value in modules.state_dict().items()}
    for number, parameter in enumerate(parameters):
        for name in OPTIMISER_STATE[optimisation.optimiser]:
            expected[f"{name}/{number}"] = torch.zeros(()) if name == "step" else parameter
    return expected


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


def _checksum(tensors: Mapping[str, Tensor], losses: str) -> str:
    value = zlib.crc32(losses.encode())
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        value = zlib.crc32(data.tobytes(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
