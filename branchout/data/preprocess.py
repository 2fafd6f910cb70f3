"""From a decoded image to the input of a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from branchout.errors import BranchoutError

if TYPE_CHECKING:  # the manifest of a model is checked without torch
    import torch
    from torch import Tensor

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

Picture = npt.NDArray[np.uint8] | Image.Image
"""An image before it is resized for a network."""
LONGEST = 16
"""Of an image longer than this many times its shorter side only the middle is looked at, where the crop lies."""


PerChannel = tuple[Annotated[float, Field(strict=True, ge=-100, le=100)], ...]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Preprocessing:
    """Size, colour and normalisation of a network's input; mean and std are on the 0–1 scale, one per channel."""

    size: Annotated[int, Field(strict=True, ge=1, le=4096)]
    channels: Annotated[int, Field(strict=True)]
    mean: PerChannel
    std: PerChannel
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    crop: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    """The share of the resized image's shorter side that the centre crop keeps."""

    @classmethod
    def from_scratch(cls, kind: str, size: int) -> Self:
        """That of a network trained from scratch on images of a kind: grey for glyphs, else colour."""
        channels = 1 if kind == "glyph" else 3
        return cls(size, channels, (0.5,) * channels, (0.25,) * channels)

    @model_validator(mode="after")
    def _one_per_channel(self) -> Self:
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), not {self.channels}")
        if not len(self.mean) == len(self.std) == self.channels or min(self.std) <= 0:
            raise ValueError(f"mean and std need one value for each of {self.channels} channels, and std positive ones")
        return self

    def prepare(self, image: Picture, box: Sequence[float] | None = None) -> Tensor:
        """One image (of Pillow, or H×W, or H×W×C with 1, 3 or 4 channels) as a uint8 tensor C×size×size.

        Without a box it is what the network sees at test time; with one (left, top, width and height as shares of the
        image) that part of it.
        """
        import torch

        picture, mode = _picture(image), "L" if self.channels == 1 else "RGB"
        if picture.mode != mode:  # converting copies
            picture = picture.convert(mode)
        how = RESAMPLING[self.interpolation]
        if box is not None:
            width, height = picture.size
            left, top = box[0] * width, box[1] * height
            corners = (left, top, min(left + box[2] * width, width), min(top + box[3] * height, height))
            picture = picture.resize((self.size, self.size), how, box=corners)
        elif self.crop < 1 or picture.size != (self.size, self.size):
            picture = _shortened(picture)
            target = int(self.size / self.crop)  # rounded as timm and torchvision do, to see the very same pixels
            width, height = (side * target // min(picture.size) for side in picture.size)
            left, top = round((width - self.size) / 2), round((height - self.size) / 2)
            picture = picture.resize((width, height), how).crop((left, top, left + self.size, top + self.size))
        pixels = np.array(picture)
        return torch.from_numpy(pixels.reshape(self.size, self.size, self.channels)).permute(2, 0, 1).contiguous()

    def normalise(self, batch: Tensor) -> Tensor:
        """A batch N×C×H×W of bytes, or of floats between 0 and 1, as the network wants it."""
        if not batch.is_floating_point():
            batch = batch.float() / 255
        mean, std = _constants(self.mean, self.std, batch.device)
        return (batch - mean) / std


def _picture(image: Picture) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if image.dtype != np.uint8:
        raise BranchoutError(f"images are 8-bit (uint8), not {image.dtype}")
    return Image.fromarray(image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image)


def _shortened(picture: Image.Image) -> Image.Image:
    """The middle of a very long or tall image: resized as a whole it could take far too much memory."""
    width, height = picture.size
    most = LONGEST * min(width, height)
    if max(width, height) <= most:
        return picture
    left, top = max(0, (width - most) // 2), max(0, (height - most) // 2)
    return picture.crop((left, top, left + min(width, most), top + min(height, most)))


@lru_cache(maxsize=16)
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """On the device once for all: a copy to a GPU in every batch would make it wait."""
    import torch

    both = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (mean, std))
    return next(both), next(both)
