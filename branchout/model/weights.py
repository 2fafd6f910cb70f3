"""Tensors in files: read without running code, compared with what is expected, refused where they are not finite."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.serialization import safe_globals

from branchout import files
from branchout.errors import BranchoutError, explain_os_error, printable, some

LARGEST = 1e15
"""The largest magnitude of a weight. No trained network comes near it, and larger ones overflow in the first layers."""


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, networks are built without memory for their weights: to compare shapes before it is taken."""
    with torch.device("meta"), _NoRandomness():
        yield


class _NoRandomness(TorchFunctionMode):
    """Skips random initialisation: for tensors without memory it does nothing, after seconds of imports by torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **kwargs)


def read_shapes(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file from its header, without content or memory; types are float or integer."""
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 – it is not a dictionary
            types = {True: torch.float32, False: torch.int64}
            return {
                name: torch.empty(part.get_shape(), dtype=types["F" in part.get_dtype()], device="meta")
                for name, part in parts.items()
            }
    except (SafetensorError, ValueError, OverflowError, RuntimeError) as error:
        raise BranchoutError(
            f"{path.name} was changed or truncated: it is not a valid safetensors file ({error!r})"
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; numbers stored in half precision come back as float32."""
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in load_file(path).items()}
    check_finite(tensors, path.name)
    return tensors


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse NaN, infinity and numbers that would become one."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
            continue
        least, most = (value.item() for value in tensor.detach().aminmax())
        if not -LARGEST <= least <= most <= LARGEST:  # also false for NaN
            raise BranchoutError(
                f"{printable(name)} in {source} has values from {least:g} to {most:g}. Weights must be finite and at "
                f"most {LARGEST:g} in magnitude; the training that made them probably diverged"
            )


def check_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """Refuse tensors that are missing, unexpected, of another shape, or whole numbers where others are expected."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    differing = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found
        and (tensor.shape, tensor.is_floating_point()) != (found[name].shape, found[name].is_floating_point())
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("of another shape or type", differing))
    sentences = [f"{what}: {some(names)}" for what, names in problems if names]
    if sentences:
        raise BranchoutError(f"{source}: {'; '.join(sentences)}")


PREFIXES = ("module.", "_orig_mod.", "model.")
"""What parallel training, torch.compile and Lightning put before every name."""


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The state dict in a file, which may lie one level down, and the architecture that timm's training recorded."""
    try:
        files.open_regular(path).close()
        with warnings.catch_warnings(action="ignore"), safe_globals([Namespace]):  # of damaged files; timm's options
            safetensors = path.suffix == ".safetensors"
            content: Any = load_file(path) if safetensors else torch.load(path, "cpu", weights_only=True)
    except OSError as error:
        raise BranchoutError(f"Checkpoint {path} cannot be read: {explain_os_error(error)}") from error
    except Exception as error:  # a damaged file fails in many ways
        raise BranchoutError(
            f"{path} cannot be read as plain tensors. It may be damaged, or hold more than a state dict; save it again "
            "with torch.save(network.state_dict(), path)"
        ) from error
    recorded = content.get("arch") if isinstance(content, dict) else None
    for wrapper in ("state_dict_ema", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(map(_is_entry, content.keys(), content.values())):
        raise BranchoutError(f"{path} holds no state dict: expected names and tensors, at the top or under state_dict")
    tensors: dict[str, Tensor] = content
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    check_finite(tensors, str(path))
    return tensors, recorded if isinstance(recorded, str) else None


def _is_entry(name: object, value: object) -> bool:
    """Whether this is a name and an ordinary tensor that holds as much memory as its shape needs."""
    return (
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_quantized
        and not value.is_complex()
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )
