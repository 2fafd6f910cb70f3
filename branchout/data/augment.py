"""Random views of images, a whole batch at a time on the device, with its own randomness for every sample.

Cropping and colour are the paper's: random resized crop, flip, colour jitter (.4, .4, .4, .2). A mirrored or
discoloured character is another character, so glyphs are cropped, shifted and re-contrasted only. Under the name
`padded` there is also what CIFAR's literature trains with: an image padded, cut to its size again, and flipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.errors import BranchoutError, unknown

RATIO = (3 / 4, 4 / 3)
SMALL = 96
"""Photographs up to this size are augmented mildly."""
PADDED = "padded"
NAMES = (PADDED,)
"""Augmentations that can be asked for by name, whatever the size."""


@dataclass(frozen=True)
class Augmentation:
    """How far a random view may depart from the image."""

    area: tuple[float, float]
    """Share of the image that a crop covers."""
    flip: bool
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    """In turns of the colour circle, as torchvision has it."""
    pad: int = 0
    """Pixels of black that an image is padded by before it is cut to its own size again at a random whole pixel;
    nothing is scaled then, and `area` says nothing. 0: random resized crops."""
    mixed: bool = False
    """Every view is mixed with another one of its batch: see `mix`."""


def for_kind(kind: str, size: int, *, few: bool = False, named: str | None = None) -> Augmentation:
    """The augmentation a kind of image declares; with `few`, for a branch that learns from few images.

    With `named` it is the one of that name, for few and for many; glyphs are not mirrored in it either.

    Small photographs hold too little to lose most of it: the paper's jitter is made for larger ones, and takes two
    points from a base model trained at 64 pixels. A new branch sees far fewer images, overfits, and gains by more.
    """
    if named not in (None, *NAMES):
        raise unknown("augmentation", named, NAMES)
    if named == PADDED and kind in ("photo", "glyph"):
        return Augmentation((1.0, 1.0), kind == "photo", 63 / 255, pad=4)
    if kind == "photo" and size <= SMALL:
        if few:
            return Augmentation((0.25, 1.0), True, 0.4, 0.4, 0.4)
        return Augmentation((0.35, 1.0), True, 0.2, 0.2, 0.2, 0.05)
    if kind == "photo":
        return Augmentation((0.08, 1.0), True, 0.4, 0.4, 0.4, 0.2)
    if kind == "glyph":
        return Augmentation((0.7, 1.0), False, 0.2, 0.3)
    raise BranchoutError(f"no augmentation is known for images of kind {kind!r}; known are: photo, glyph")


@dataclass(frozen=True)
class Shared:
    """Random numbers for a batch that several processes share: drawn for all its images, kept for some."""

    generator: torch.Generator
    images: int
    """How many the whole batch has."""
    rows: slice
    """Those that are kept."""


Random = torch.Generator | Shared


def _drawn(draw: Callable[..., Tensor], shape: tuple[int, ...], random: Random) -> Tensor:
    if isinstance(random, torch.Generator):
        return draw(shape, generator=random, device=random.device)
    return _drawn(draw, (random.images, *shape[1:]), random.generator)[random.rows]


def crop_boxes(count: int, area: tuple[float, float], random: Random) -> Tensor:
    """`count` random boxes (left, top, width, height) as shares of the image, on the generator's device."""
    draw = _drawn(torch.rand, (count, 4), random)
    share = area[0] + (area[1] - area[0]) * draw[:, 0]
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    ratio = torch.exp(low + (high - low) * draw[:, 1])
    width = (share * ratio).sqrt().clamp(max=1.0)
    height = (share / ratio).sqrt().clamp(max=1.0)
    return torch.stack([(1 - width) * draw[:, 2], (1 - height) * draw[:, 3], width, height], dim=1)


def crop(images: Tensor, boxes: Tensor, mirrored: Tensor, size: int | None = None) -> Tensor:
    """Cut each image (N, C, H, W; float) to its box, scale it to `size` or back, and mirror where asked."""
    if not len(images):  # a process may have no part of a small batch
        return images if size is None else images.new_empty(0, images.shape[1], size, size)
    left, top, width, height = boxes.to(images.dtype).unbind(1)
    sign = torch.where(mirrored, -1.0, 1.0).to(images.dtype)
    zero = torch.zeros_like(left)
    theta = torch.stack([width * sign, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1], dim=1).view(
        -1, 2, 3
    )
    shape = list(images.shape) if size is None else [*images.shape[:2], size, size]
    grid = F.affine_grid(theta, shape, align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def shift(images: Tensor, places: Tensor, pad: int, mirrored: Tensor) -> Tensor:
    """Cut each padded image to its own size with its corner (left, top) at its place, and mirror where asked.

    Pixels are taken, never mixed.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (pad, pad, pad, pad))
    left, top = places.unbind(1)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    each = torch.arange(len(images), device=images.device)
    return padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def cut(images: Tensor, augmentation: Augmentation, random: Random, size: int | None = None) -> Tensor:
    """A random part of each image, scaled or shifted as the augmentation has it, and maybe mirrored."""
    count = len(images)
    if augmentation.pad:
        high = 2 * augmentation.pad + 1
        places = _drawn(partial(torch.randint, high), (count, 2), random)
        return shift(images, places, augmentation.pad, mirrors(count, augmentation, random))
    boxes = crop_boxes(count, augmentation.area, random)
    return crop(images, boxes, mirrors(count, augmentation, random), size)


def mirrors(count: int, augmentation: Augmentation, random: Random) -> Tensor:
    """Which of `count` images to mirror."""
    return _drawn(torch.rand, (count,), random) < (0.5 if augmentation.flip else 0.0)


def recolour(images: Tensor, augmentation: Augmentation, random: Random) -> Tensor:
    """Colour jitter of images with values 0–1: brightness, contrast, saturation, then hue, clipped at the end."""
    count, channels = images.shape[:2]
    draw = _drawn(torch.rand, (count, 4), random) * 2 - 1
    light = 1 + augmentation.brightness * draw[:, 0]
    contrast = 1 + augmentation.contrast * draw[:, 1]
    gain = (light * contrast).view(-1, 1, 1, 1)
    if channels == 1:
        mean = images.mean((1, 2, 3)) * light
        return (images * gain + ((1 - contrast) * mean).view(-1, 1, 1, 1)).clamp_(0, 1)
    to_yiq, from_yiq = _yiq(images.device, images.dtype)
    grey_mean = (images.mean((2, 3)) @ to_yiq[0]) * light
    saturation = 1 + augmentation.saturation * draw[:, 2]
    angle = 2 * math.pi * augmentation.hue * draw[:, 3]
    rotation = torch.zeros(count, 3, 3, device=images.device, dtype=images.dtype)
    rotation[:, 0, 0] = 1
    rotation[:, 1, 1] = rotation[:, 2, 2] = saturation * angle.cos()
    rotation[:, 2, 1] = saturation * angle.sin()
    rotation[:, 1, 2] = -rotation[:, 2, 1]
    matrix = from_yiq @ rotation @ to_yiq * gain.view(-1, 1, 1)
    shift = ((1 - contrast) * grey_mean).view(-1, 1, 1, 1)  # grey, which neither saturation nor hue moves
    mixed = torch.bmm(matrix, images.flatten(2)).view_as(images)
    return (mixed + shift).clamp_(0, 1)


def mix(images: Tensor, augmentation: Augmentation, random: Random) -> Tensor:
    """Mix each image with one of the batch, if asked: half of them as a sum (mixup), the others by a rectangle of the
    other one (CutMix). The share of the other one is uniform between 0 and 1.

    There are no labels for them: they are for distillation, where a teacher answers what it sees. Of several processes,
    each mixes its own part of the batch.
    """
    if not augmentation.mixed:
        return images
    (height, width), count = images.shape[2:], len(images)
    order, share, left, top, kind = _drawn(torch.rand, (count, 5), random).to(images.dtype).unbind(1)
    side = share.sqrt()
    rows, columns = (
        ((torch.arange(size, device=images.device) + 0.5) / size - (start * (1 - side))[:, None] - side[:, None] / 2)
        .abs()
        .le(side[:, None] / 2)
        for size, start in ((height, top), (width, left))
    )
    inside = (rows[:, :, None] & columns[:, None, :]).to(images.dtype)
    weight = torch.where(kind[:, None, None] < 0.5, inside, share[:, None, None])
    return torch.lerp(images, images[order.argsort()], weight[:, None])


@lru_cache(maxsize=8)
def _yiq(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RGB → YIQ and back. Hue is an angle in the IQ plane, so the whole jitter is one 3×3 matrix for each image."""
    there = [(0.299, 0.587, 0.114), (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)]
    matrix = torch.tensor(there, device=device, dtype=dtype)
    return matrix, torch.linalg.inv(matrix)
