"""The networks that can be trained from scratch, and their descriptions in saved models."""

from __future__ import annotations

from typing import Any

from branchout.data.preprocess import Preprocessing
from branchout.errors import unknown
from branchout.model import resnet, vit

ARCHITECTURES = (*resnet.ARCHITECTURES, *vit.ARCHITECTURES)
FAMILIES = ("resnet", "vit")
"""The families that `describe` covers."""


def is_transformer(arch: str) -> bool:
    return arch in vit.ARCHITECTURES


def check(arch: str, size: int | None = None, width: int | None = None) -> None:
    """Raise for an unknown architecture, or for a size and width that it cannot have, before any data is read."""
    if arch not in ARCHITECTURES:
        raise unknown("architecture", arch, ARCHITECTURES)
    if is_transformer(arch) and size is not None:
        vit.check(arch, size, width)


def describe(
    arch: str, preprocessing: Preprocessing, *, width: int | None = None, last_relu: bool = True
) -> dict[str, Any]:
    """The description from which `bases.rebuild` makes the network for images of this size."""
    check(arch)
    size, channels = preprocessing.size, preprocessing.channels
    if is_transformer(arch):
        patch = vit.patch_for(size)
        return {"family": "vit", "name": arch, "size": size, "patch": patch, "width": width, "in_channels": channels}
    stem = "small" if size <= 96 else "large"
    described = {"family": "resnet", "name": arch, "stem": stem, "width": width, "in_channels": channels}
    return described if last_relu else {**described, "last_relu": False}
