"""The frozen part of stage I: its outputs for a few augmented views are computed once and reused in every epoch.

Trunk and earlier branches never change during stage I. Where memory allows, their outputs are cached; otherwise the
trunk runs in every epoch ("live").

Symbols: h(x; Φ_s) → `outputs[0]`, what enters the new branch · z_b, z_n1, … → `outputs[1]`
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchout.data.images import Images, ResidentImages, forward_batch, in_order, on_device, part_of, shuffled
from branchout.disk_cache import cache_folder, cache_limit, forget_pages, scratch_array, scratch_room
from branchout.errors import BranchoutError
from branchout.files import read_json, write_json
from branchout.labels import Ints
from branchout.method.compressed_maps import as_cached, as_computed, table_in
from branchout.method.frozen import Frozen
from branchout.training import processes
from branchout.training.device import give_back_memory
from branchout.training.loop import Event, OnProgress, seed_for, silent
from branchout.training.out_of_memory import empty_cache, out_of_memory
from branchout.units import size

_log = logging.getLogger(__name__)
CACHE_LIMIT = 4 << 30
"""Bytes of cached outputs on a CPU; on a GPU a third of all its memory: a resumed run must see the same views."""
FEWEST_VIEWS = 4
"""Where not even so many views fit, the trunk runs live: fewer views cost accuracy."""
CHUNK = 256
"""Images per forward pass while the cache is filled."""
GPU_CHUNK = 1024
"""The same for small images on a GPU: with 256, it would wait for the next kernel launch."""


class TrunkOutputs:
    """Outputs of the frozen part for the images of several sources: new images, and exemplars where they are replayed.

    `views` > 0 caches that many augmented views of each new image, or as many as fit under `limit` bytes. Where fewer
    than `FEWEST_VIEWS` fit, they are kept on disk, or else the trunk runs live; without `live`, at least one view is
    cached in memory. The first epoch fills the cache. `compressed` keeps feature maps in 8 bits, on a CPU on disk.
    A file beside `checkpoint` keeps the number of views for a run that resumes with another amount of free disk.
    """

    def __init__(
        self,
        frozen: Frozen,
        sources: Sequence[Images],
        views: int,
        exemplar_views: int | None = None,
        *,
        limit: int | None = None,
        compressed: bool = False,
        live: bool = True,
        checkpoint: Path | None = None,
        seed: int = 0,
        on_progress: OnProgress = silent,
    ) -> None:
        self.frozen = frozen
        self.live = live
        self.compressed = compressed
        self.sources = sources
        self.views = views
        self.exemplar_views = exemplar_views
        self.limit = default_limit(frozen.device) if limit is None else limit
        self.checkpoint = checkpoint if processes.count() == 1 else None  # several processes never use the disk
        self.seed = seed
        self.on_progress = on_progress
        self.scratch: list[npt.NDArray[np.uint8]] = []
        """The memory of tables that are kept on disk."""

    def batches(self, epoch: int, orders: Sequence[Sequence[Ints]]) -> Iterator[list[Tensor]]:
        """The outputs for one epoch's batches; `orders` holds, for each source, the images of every batch.

        Several processes each get what enters the branch for their part of a batch, and the logits of all of it.
        """
        if self.cached_views:
            streams = [
                _rows(table, rows, self.frozen.device)
                for table, rows in zip(self.tables, self._rows_of(epoch, orders), strict=True)
            ]
        else:
            streams = [
                self._live(images, order, seed_for(self.seed, epoch, 2 + n))
                for n, (images, order) in enumerate(zip(self.sources, orders, strict=True))
            ]
        for parts in zip(*streams, strict=True):
            forget_pages(*self.scratch)
            yield [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def _live(self, images: Images, order: Sequence[Ints], seed: int) -> Iterator[list[Tensor]]:
        for batch, (x, *logits) in zip(order, self.frozen.live(images, order, seed), strict=True):
            yield [x, *(processes.gather(z, [len(batch)]) for z in logits)]

    def _rows_of(self, epoch: int, orders: Sequence[Sequence[Ints]]) -> list[list[Ints]]:
        """Rows of the tables: new images in view `epoch` modulo the number of views, exemplars each in any view."""
        new, *replayed = orders
        rows = [[order + epoch % self.cached_views[0] * len(self.sources[0]) for order in new]]
        for images, views, order in zip(self.sources[1:], self.cached_views[1:], replayed, strict=True):
            rng = np.random.default_rng(seed_for(self.seed, epoch, 2))
            any_view = rng.integers(views, size=(len(order), len(order[0]))) * len(images)
            rows.append([indices + view for indices, view in zip(order, any_view, strict=True)])
        return rows

    @cached_property
    def cached_views(self) -> list[int]:
        """How many views of each source's images are cached; empty if the trunk runs live."""
        if not self.views:
            return []
        kept = self.checkpoint and self.checkpoint.with_name("views.json")
        with suppress(BranchoutError, KeyError, TypeError, ValueError):
            # Without a checkpoint nothing was trained with these views: the run may have failed because of them.
            if self.checkpoint and kept and self.checkpoint.exists() and kept.exists():
                views = [int(each) for each in read_json(kept)["views"]]
                # A device with more memory may have kept more than this one can hold.
                if self._bytes(views) <= max(self.limit, cache_limit()):
                    return views
        views = self._views_within(self.limit)
        if not views and processes.count() == 1:
            views = self._views_within(min(cache_limit(), scratch_room()))
        if kept:
            write_json(kept, {"views": views})
        return views

    def _bytes(self, views: Sequence[int]) -> int:
        return self.image_bytes * int(np.dot(views, [len(images) for images in self.sources])) if views else 0

    @cached_property
    def image_bytes(self) -> int:
        """What one image takes in the tables."""
        with processes.independent():
            (outputs,) = self.frozen.live(self.sources[0], [np.zeros(1, dtype=np.int64)], 0, full_batches=True)
        return sum(as_cached(output, compressed=self.compressed).nbytes for output in outputs)

    @cached_property
    def on_disk(self) -> bool:
        needed = self._bytes(self.cached_views)
        # On a CPU training needs the memory. Space that cannot be reserved might be gone later: that ends the process.
        alone = processes.count() == 1 and self.frozen.device.type == "cpu" and hasattr(os, "posix_fallocate")
        if self.compressed and alone and needed <= min(cache_limit(), scratch_room()):
            return True
        if not self.live or needed <= self.limit:
            return False
        _log.info("Frozen features take %s, above the memory limit: kept on disk, in %s.", size(needed), cache_folder())
        return True

    def _views_within(self, limit: int) -> list[int]:
        sizes = [len(images) for images in self.sources]
        each: list[int] = []
        for views in range(self.views, (min(self.views, FEWEST_VIEWS) if self.live else 1) - 1, -1):
            of_exemplars = self.exemplar_views
            if of_exemplars is not None and views < self.views:
                of_exemplars = min(of_exemplars, views)
            each = views_per_source(views, sizes, of_exemplars)
            if self._bytes(each) <= limit:
                return each
        return [] if self.live else each

    @cached_property
    def tables(self) -> list[list[Tensor]]:
        """For each source the outputs for its cached views, one view after the other."""
        total = sum(views * len(images) for views, images in zip(self.cached_views, self.sources, strict=True))
        done = 0
        tables: list[list[Tensor]] = []
        for number, (images, views) in enumerate(zip(self.sources, self.cached_views, strict=True)):
            table: list[Tensor] = []
            filled = 0
            for view in range(views):
                seed = seed_for(self.seed, view, 7 + number)
                order = self._order(images, seed)
                filling = self.frozen.live(images, order, seed, full_batches=True)
                for batch, found in zip(order, filling, strict=True):
                    outputs = [as_cached(output, compressed=self.compressed) for output in found]
                    table = table or self._empty_table(views * len(images), outputs)
                    own = torch.from_numpy(batch[processes.rank() :: processes.count()] + view * len(images))
                    for whole, part in zip(table, outputs, strict=True):
                        whole[own.to(whole.device)] = part.to(whole.device)  # the disk's tables are on the CPU
                    forget_pages(*self.scratch)
                    filled += len(batch)
                    self.on_progress(Event("Computing frozen features", done + filled, total))
            done += filled
            tables.append([processes.sum_up(whole) for whole in table])
        self.frozen.close()
        give_back_memory()
        return tables

    def _order(self, images: Images, seed: int) -> list[Ints]:
        """All images in batches; shuffled by `seed` where images are mixed, so that each meets others in every view."""
        small = isinstance(images, ResidentImages) and self.frozen.device.type == "cuda"
        chunk = forward_batch(images, GPU_CHUNK if small else CHUNK)
        mixed = self.frozen.augmentation.mixed
        return shuffled(len(images), chunk, seed) if mixed else in_order(len(images), chunk)

    def _empty_table(self, rows: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Room for `rows` outputs; on disk where other programs have left too little of the GPU's memory."""
        before = len(self.scratch)
        try:
            return [self._empty(rows, output, on_disk=self.on_disk) for output in outputs]
        except BranchoutError:  # a disk with a quota, or a file system without shared memory
            if self._bytes(self.cached_views) > self.limit:
                raise
            del self.scratch[before:]  # the first columns may have got their space
            return [self._empty(rows, output, on_disk=False) for output in outputs]
        except RuntimeError as error:
            needed = rows * sum(output[0].nbytes for output in outputs)
            room = min(cache_limit(), scratch_room())
            if not (out_of_memory(error) and self.live and processes.count() == 1 and needed <= room):
                raise
        empty_cache()
        _log.info("The GPU has too little free memory for %s of frozen features: kept on disk.", size(needed))
        return [self._empty(rows, output, on_disk=True) for output in outputs]

    def _empty(self, rows: int, like: Tensor, *, on_disk: bool) -> Tensor:
        """One of its columns; feature maps have the network's memory layout."""
        layout = self.frozen.model.backbone.layout(like.device) if like.ndim == 4 else torch.contiguous_format
        if on_disk and like.numel():
            self.scratch.append(scratch_array((rows, like[0].numel() * like.element_size())))
            return table_in(self.scratch[-1], like, layout)
        table = torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device, memory_format=layout)
        return table if processes.count() == 1 else table.zero_()  # the other processes' rows will be added


def default_limit(device: torch.device) -> int:
    if device.type != "cuda":
        return CACHE_LIMIT
    return int(torch.cuda.get_device_properties(device).total_memory) // 3


def views_per_source(views: int, sizes: Sequence[int], exemplar_views: int | None = None) -> list[int]:
    """How many views of each new image are cached, and of each exemplar: unless a number is given, as many as give both
    about as many rows, because exemplars are few and drawn often."""
    return [views] + [exemplar_views or max(1, round(views * sizes[0] / size)) for size in sizes[1:]]


def _rows(table: Sequence[Tensor], order: Sequence[Ints], device: torch.device) -> Iterator[list[Tensor]]:
    place = table[0].device  # the CPU's where the table is on disk
    parts = on_device(part_of(order, processes.part()), place)
    for own, index in zip(parts, on_device(order, place), strict=True):
        chosen = [table[0][own], *(tensor[index] for tensor in table[1:])]
        yield [as_computed(each.to(device)) for each in chosen]
