"""Images for the network: decoded, augmented, normalised, in batches.

Small images are decoded once into an array that is cached on disk and stays on the device if it fits there
(`ResidentImages`); large ones are decoded again for every view by worker processes (`StreamedImages`). Both have the
same two methods: `views` (random, for training) and `plain` (for everything else), one tensor per batch of positions.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import JoinedPixels, Pixels, Samples, digest
from branchout.disk_cache import load_cached, scratch_array, store_cached
from branchout.errors import BranchoutError
from branchout.labels import Ints

Part = tuple[int, int]
"""Which of how many processes: each takes every n-th image of a batch."""
SMALL = 128
"""Up to this input size images are kept decoded: 100,000 of them take 5 GB at 128×128, 1.2 GB at 64×64."""


LARGE_IMAGES = 16
"""Images larger than `SMALL` in one forward pass on a CPU."""
DECODED_AT_ONCE = 32
"""The most images that a worker decodes for one batch: the workers share a larger batch."""


class Images(Protocol):
    """The images of one sample table, ready for one network."""

    def __len__(self) -> int: ...

    def plain(self, batches: Sequence[Ints]) -> Iterator[Tensor]:
        """The images at each batch of positions as the network sees them at test time, on the device."""

    def views(
        self, batches: Sequence[Ints], augmentation: Augmentation, seed: int, part: Part = (0, 1)
    ) -> Iterator[Tensor]:
        """A random view of each; the same seed and batches give the same views.

        With `part` (r, n) only positions r, r + n, r + 2n, … of each batch, as they are in the whole batch.
        """


def open_images(
    samples: Samples,
    preprocessing: Preprocessing,
    device: torch.device,
    *,
    cache: Path | None = None,
    memory_limit: int | None = None,
) -> Images:
    """Resident images where the network's input is small, streamed ones otherwise.

    Decoded images of more than `memory_limit` bytes stay on disk.
    """
    if preprocessing.size <= SMALL:
        pixels = decoded(samples, preprocessing, cache, memory_limit)
        fits = device.type != "cuda" or pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 2
        fits = fits and (memory_limit is None or pixels.nbytes <= memory_limit)
        return ResidentImages(torch.from_numpy(pixels).to(device if fits else "cpu"), preprocessing, device)
    return StreamedImages(samples, preprocessing, device, cores())


@dataclass(eq=False)
class ResidentImages:
    """All images decoded, as one uint8 tensor; cropped and recoloured in batches on the device."""

    pixels: Tensor
    preprocessing: Preprocessing
    device: torch.device

    def __len__(self) -> int:
        return len(self.pixels)

    def _gather(self, batches: Sequence[Ints]) -> Iterator[Tensor]:
        for index in on_device(batches, self.pixels.device):
            yield self.pixels[index].to(self.device).float() / 255

    def plain(self, batches: Sequence[Ints]) -> Iterator[Tensor]:
        for images in self._gather(batches):
            yield self.preprocessing.normalise(images)

    def views(
        self, batches: Sequence[Ints], augmentation: Augmentation, seed: int, part: Part = (0, 1)
    ) -> Iterator[Tensor]:
        draws = _draws(torch.Generator(self.device).manual_seed(seed), batches, part)
        for random, images in zip(draws, self._gather(part_of(batches, part)), strict=True):
            images = augment.cut(images, augmentation, random, self.preprocessing.size)
            images = augment.recolour(images, augmentation, random)
            yield self.preprocessing.normalise(augment.mix(images, augmentation, random))


@dataclass(eq=False)
class Gallery:
    """Images of many tables that share their sources: each image is decoded once, tables are picked from them."""

    preprocessing: Preprocessing
    device: torch.device
    cache: Path | None = None
    _sources: dict[int, Source] = field(default_factory=dict)

    def images(self, samples: Samples) -> Images:
        if self.preprocessing.size > SMALL:
            return open_images(samples, self.preprocessing, self.device)
        return ResidentImages(self._pick(samples.pixels, samples.rows), self.preprocessing, self.device)

    def _pick(self, pixels: Pixels, rows: Ints) -> Tensor:
        if isinstance(pixels, JoinedPixels):
            part_of, inner = pixels.locate(rows)
            joined = torch.cat([self._pick(part, inner[part_of == n]) for n, part in enumerate(pixels.parts)])
            back = np.argsort(np.argsort(part_of, kind="stable"), kind="stable")
            return joined[torch.from_numpy(back).to(joined.device)]
        if id(pixels) not in self._sources:
            empty = torch.empty((0, self.preprocessing.channels, *[self.preprocessing.size] * 2), dtype=torch.uint8)
            self._sources[id(pixels)] = Source(pixels, np.full(len(pixels), -1), empty)
        source = self._sources[id(pixels)]
        missing = np.unique(rows[source.place[rows] < 0])
        if len(missing):
            table = Samples.build(pixels, np.full(len(missing), "-"), missing.astype(np.str_), rows=missing)
            resident = open_images(table, self.preprocessing, self.device, cache=self.cache)
            assert isinstance(resident, ResidentImages)
            known, fresh = source.decoded, resident.pixels
            source.decoded = torch.cat([known, fresh.to(known.device)]) if len(known) else fresh
            source.place[missing] = len(known) + np.arange(len(missing))
        return source.decoded[torch.from_numpy(source.place[rows]).to(source.decoded.device)]


@dataclass
class Source:
    """What a gallery has decoded of one source."""

    pixels: Pixels  # kept, so that its id stays its own
    place: Ints
    """For each row where it is among the decoded ones; -1 if it is not."""
    decoded: Tensor


@dataclass(eq=False)
class StreamedImages:
    """Images decoded again for every view by worker processes; only cropping happens there."""

    samples: Samples
    preprocessing: Preprocessing
    device: torch.device
    workers: int

    def __len__(self) -> int:
        return len(self.samples)

    def plain(self, batches: Sequence[Ints]) -> Iterator[Tensor]:
        pieces = [_batches(positions, DECODED_AT_ONCE) or [positions] for positions in batches]
        count = sum(map(len, pieces))
        loaded = self._load(whole([positions for each in pieces for positions in each]), count)
        for each in pieces:
            images = torch.cat([next(loaded).to(self.device, non_blocking=True) for _ in each])
            yield self.preprocessing.normalise(images.float() / 255)

    def views(
        self, batches: Sequence[Ints], augmentation: Augmentation, seed: int, part: Part = (0, 1)
    ) -> Iterator[Tensor]:
        if self.device.type == "cuda" and not augmentation.pad and self._fit():
            yield from self._thumbnails.views(batches, augmentation, seed, part)
            return
        draws = _draws(torch.Generator(self.device).manual_seed(seed), batches, part)
        # With padding, whole images are shifted on the device.
        jobs = whole(part_of(batches, part)) if augmentation.pad else _cropped(batches, augmentation, seed, part)
        for random, images in zip(draws, self._load(jobs, len(batches)), strict=True):
            batch = images.to(self.device, non_blocking=True).float() / 255
            if augmentation.pad:
                batch = augment.cut(batch, augmentation, random)
            else:
                mirrored = augment.mirrors(len(batch), augmentation, random)
                batch = torch.where(mirrored.view(-1, 1, 1, 1), batch.flip(3), batch)
            batch = augment.recolour(batch, augmentation, random)
            yield self.preprocessing.normalise(augment.mix(batch, augmentation, random))

    def _load(self, jobs: Jobs, count: int) -> Iterator[Tensor]:
        workers = min(self.workers, count)
        return load(self.samples, self.preprocessing, jobs, workers, pin=self.device.type == "cuda")

    # A GPU crops faster than a CPU decodes: where they fit there, whole images are decoded once, somewhat larger than
    # the network's input, and every view is cropped from them on the device.

    def _fit(self) -> bool:
        how = self.preprocessing
        needed = len(self.samples) * how.channels * _thumbnail_size(how) ** 2
        return "_thumbnails" in vars(self) or needed < torch.cuda.mem_get_info(self.device)[0] // 4

    @cached_property
    def _thumbnails(self) -> ResidentImages:
        """All images, stretched to squares, on the device."""
        larger = replace(self.preprocessing, size=_thumbnail_size(self.preprocessing))
        batches = in_order(len(self.samples), 64)
        workers = min(self.workers, len(batches))
        loaded = load(self.samples, larger, whole(batches, WHOLE), workers)
        pixels = torch.cat([batch.to(self.device) for batch in loaded])
        return ResidentImages(pixels, self.preprocessing, self.device)


WHOLE = (0.0, 0.0, 1.0, 1.0)
"""The box that is the whole image."""


def _thumbnail_size(preprocessing: Preprocessing) -> int:
    return preprocessing.size * 9 // 7  # 288 for 224


Job = tuple[int, tuple[float, ...] | None]
"""A position, and the box to crop it to (left, top, width, height as shares) or None for the plain image."""
Jobs = Iterable[list[Job]]
"""A list for each batch, made when it is wanted: those of a million images take much memory."""


def whole(batches: Sequence[Ints], box: tuple[float, ...] | None = None) -> Jobs:
    return ([(int(i), box) for i in positions] for positions in batches)


def _cropped(batches: Sequence[Ints], augmentation: Augmentation, seed: int, part: Part) -> Jobs:
    draws = _draws(torch.Generator().manual_seed(seed), batches, part)
    for random, positions in zip(draws, part_of(batches, part), strict=True):
        boxes = augment.crop_boxes(len(positions), augmentation.area, random).tolist()
        yield [(int(i), tuple(box)) for i, box in zip(positions, boxes, strict=True)]


@dataclass(eq=False)
class CroppedSamples(torch.utils.data.Dataset[Tensor]):
    """What a worker does: decode images and crop them to the network's size."""

    samples: Samples
    preprocessing: Preprocessing

    def __getitems__(self, jobs: list[Job]) -> Tensor | BranchoutError:
        """A whole batch. An error is returned: raised in a worker, it would arrive as a traceback."""
        try:
            images = [self.preprocessing.prepare(self.samples.picture(n), box) for n, box in jobs]
            none = torch.empty((0, self.preprocessing.channels, *[self.preprocessing.size] * 2), dtype=torch.uint8)
            return torch.stack(images) if images else none
        except BranchoutError as error:
            return error


def load(
    samples: Samples, preprocessing: Preprocessing, jobs: Jobs, workers: int, pin: bool = False
) -> Iterator[Tensor]:
    """Decoded batches, one per list of jobs, made by `workers` processes (0: by this one).

    A daemonic process, such as a Dask worker, may not start any.
    """
    workers = 0 if multiprocessing.current_process().daemon else workers
    loader = torch.utils.data.DataLoader(
        CroppedSamples(samples, preprocessing),
        batch_sampler=jobs,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin,
    )
    for batch in loader:
        if isinstance(batch, BranchoutError):
            raise batch
        yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


def cores() -> int:
    """How many processes may decode at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decoded(
    samples: Samples, preprocessing: Preprocessing, cache: Path | None, memory_limit: int | None = None
) -> npt.NDArray[np.uint8]:
    """All images at the network's size (N, C, size, size), read from `cache` if they were decoded before."""
    shape = (len(samples), preprocessing.channels, preprocessing.size, preprocessing.size)
    kept = f"pixels/{digest(samples.fingerprint(), repr(preprocessing))}" if cache else ""
    stored = load_cached(cache, kept, shape, np.uint8)
    if stored is not None:
        return stored
    large = memory_limit is not None and math.prod(shape) > memory_limit
    pixels = scratch_array(shape) if large else np.empty(shape, dtype=np.uint8)
    batches = in_order(len(samples), 512)
    workers = cores() if len(batches) > 4 else 0  # starting processes costs more than decoding a few images
    for positions, images in zip(batches, load(samples, preprocessing, whole(batches), workers), strict=True):
        pixels[positions] = images.numpy()
    store_cached(cache, kept, pixels)
    return pixels


# The order in which samples are seen.


def part_of(batches: Sequence[Ints], part: Part) -> Sequence[Ints]:
    """The positions of each batch that one of several processes takes."""
    return batches if part[1] == 1 else [batch[part[0] :: part[1]] for batch in batches]


def _draws(generator: torch.Generator, batches: Sequence[Ints], part: Part) -> Iterator[augment.Random]:
    """What the views of each batch are drawn from."""
    for batch in batches:
        yield generator if part[1] == 1 else augment.Shared(generator, len(batch), slice(part[0], None, part[1]))


def on_device(batches: Sequence[Ints], device: torch.device) -> Sequence[Tensor]:
    """Batches of positions as tensors, moved in one copy: one in every step would make a GPU wait."""
    if not batches:
        return []
    whole = torch.from_numpy(np.concatenate(batches)).to(device)
    return torch.split(whole, [len(batch) for batch in batches])


def forward_batch(images: Images, most: int) -> int:
    """Images per forward pass: few large ones on a CPU, so that freed tensors are small enough to be used again."""
    return min(most, LARGE_IMAGES) if isinstance(images, StreamedImages) and images.device.type == "cpu" else most


def in_order(count: int, size: int) -> list[Ints]:
    """Positions 0, 1, 2, … in batches."""
    return _batches(np.arange(count), size)


def _batches(order: Ints, size: int) -> list[Ints]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def shuffled(count: int, size: int, seed: int, *, drop_last: bool = False) -> list[Ints]:
    """Every position once, in random order. A last batch too small for a fair BatchNorm can be dropped."""
    batches = _batches(np.random.default_rng(seed).permutation(count), size)
    return batches[:-1] if drop_last and len(batches) > 1 and len(batches[-1]) < size else batches


def class_balanced(labels: Ints, per_class: int, size: int, seed: int) -> list[Ints]:
    """`per_class` positions of every class in random order: without repeats where a class has enough samples."""
    rng = np.random.default_rng(seed)
    members = (rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels))
    chosen = [np.resize(of_class, per_class) for of_class in members]
    return _batches(rng.permutation(np.concatenate(chosen)), size)
