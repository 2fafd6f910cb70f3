"""Vision transformers small enough to be trained from scratch: timm's, with one stage for each block."""

from __future__ import annotations

from branchout.errors import BranchoutError, unknown
from branchout.model.staged import Backbone
from branchout.model.timm_adapters import split_network

HEAD = 64
"""The width of one attention head, as in all common vision transformers."""


ARCHITECTURES = ("vit_tiny",)
WIDTH, DEPTH = 192, 12
"""Of `vit_tiny`: the width of a token, and the number of blocks."""


def patch_for(size: int) -> int:
    """The side of a patch: 8 pixels for small images, which would otherwise have very few patches."""
    return 8 if size <= 96 else 16


def check(name: str, size: int, width: int | None = None, patch: int | None = None) -> None:
    """Raise if images do not divide into whole patches, or tokens into whole heads."""
    if name not in ARCHITECTURES:
        raise unknown("transformer", name, ARCHITECTURES)
    width, patch = width or WIDTH, patch or patch_for(size)
    if size % patch:
        near = max(round(size / patch), 1) * patch
        raise BranchoutError(
            f"{name} divides images into patches of {patch}×{patch} pixels, and {size} pixels are not a multiple of "
            f"{patch}. Use --size {near}"
        )
    if width % heads_of(width):
        raise BranchoutError(
            f"The width of {name}, {width}, does not divide into {heads_of(width)} heads. Use a multiple of {HEAD}"
        )


def heads_of(width: int) -> int:
    return max(width // HEAD, 1)


def build(
    name: str,
    *,
    size: int,
    in_channels: int = 3,
    patch: int | None = None,
    width: int | None = None,
    depth: int | None = None,
) -> Backbone:
    """A randomly initialised network for images of exactly `size` pixels; features are the mean of all patches."""
    from timm.models.vision_transformer import VisionTransformer

    check(name, size, width, patch)
    width = width or WIDTH
    network = VisionTransformer(
        img_size=size,
        patch_size=patch or patch_for(size),
        in_chans=in_channels,
        num_classes=1,  # its head is removed; ours replaces it
        global_pool="avg",
        class_token=False,
        embed_dim=width,
        depth=depth or DEPTH,
        num_heads=heads_of(width),
    )
    return split_network(network)[0]
