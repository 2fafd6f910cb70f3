"""Stage I: train a new branch beside the frozen network (paper, section 3.3, "Feature augmentation").

The paper trains the clone Φ_n and its head W_n on new images alone:

    L = CE(z_n, y)                                                       new images, over the new classes

With `replay` (our default) exemplars are added, which compete over the logits of all branches, and copies of the old
heads on the new features learn to give the frozen logits:

    L = CE([z, z_n], y) + CE(pool([z, z_n]), y) + λ·T²·KL(z ‖ z_copied)  new images + exemplars + both

For a new image of a class that is known already, the first term leaves out the old columns of that class.
From the second step on, beside cosine heads, z + W_cᵀh_n stands in both cross-entropies for z: the branch learns what
it adds to the frozen logits. Earlier branches never saw the new images; the new one sees images of all classes.

Symbols: h(x; Φ_s) → `batch.x` · Φ_n → `NewBranch.branch` · W_n → `NewBranch.head` · h_n → `h` · z_n = W_nᵀh_n → `z_n`
· frozen logits z_b, z_n1, … → `batch.z` · z_copied → `NewBranch.copied_logits` · W_c → `NewBranch.correction`
· y → `batch.y` · D_n → `new` · E → `exemplars`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.data.augment import Augmentation
from branchout.data.images import forward_batch, in_order, on_device, shuffled
from branchout.labels import Ints
from branchout.method.compressed_maps import as_cached, as_computed
from branchout.method.frozen import Frozen
from branchout.method.new_branch import Labelled, NewBranch, initial_branch
from branchout.method.recipes import Stage1
from branchout.method.trunk_cache import CHUNK, TrunkOutputs
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import branch_point
from branchout.training import processes
from branchout.training.device import give_back_memory
from branchout.training.loop import OnProgress, fit, seed_for, silent
from branchout.training.losses import softened_kl
from branchout.training.optimisation import Optimisation, scale_to_dataset


@dataclass(frozen=True)
class Batch:
    """What the frozen part makes of some new images, followed by exemplars where they are replayed."""

    x: Tensor
    """What enters the branch; of several processes, each has its part of the batch."""
    z: Tensor
    """The logits of all earlier branches (n, columns); without replay, no columns."""
    y: Tensor
    new: int
    """How many of the images are new; the others are exemplars."""

    def split(self, parts: int) -> Iterator[tuple[float, Batch]]:
        """Parts with images of both kinds, and the share of the batch that each has."""
        old = len(self.y) - self.new
        for rows in processes.divided([self.new, old] if old else [self.new], parts):
            share = len(rows.whole) / len(self.y)
            yield share, Batch(self.x[rows.own], self.z[rows.whole], self.y[rows.whole], rows.sizes[0])


def stage1_loss(batch: Batch, new: NewBranch, settings: Stage1) -> Tensor:
    """The loss of one batch: cross-entropies, and distillation where the recipe has it."""
    h = processes.gather(new.features(batch.x), [batch.new, len(batch.y) - batch.new])
    loss = cross_entropy(new.head(h), replace(batch, z=new.corrected(batch.z, h)), new)
    if settings.distillation:
        kl = softened_kl(batch.z, new.copied_logits(h), settings.temperature)
        loss = loss + settings.distillation * settings.temperature**2 * kl
    return loss


def cross_entropy(z_n: Tensor, batch: Batch, new: NewBranch) -> Tensor:
    """Over the logits of all branches where there are exemplars; otherwise over the new classes alone.

    Without old images, frozen logits would teach the new head to exceed them always. The old column of a new image's
    own class does not compete: pooled with an old logit that is larger from the start, the new one would never get a
    gradient. Exemplars are classified by the pooled logits of all classes.
    """
    n, z, y = batch.new, batch.z, batch.y
    if n == len(y):
        return F.cross_entropy(z_n, new.column_of(y))
    competing = z[:n].masked_fill(new.old_classes == y[:n, None], -torch.inf)
    on_new = F.cross_entropy(torch.cat([competing, z_n[:n]], dim=1), new.column_of(y[:n]) + z.shape[1])
    return on_new + F.cross_entropy(new.pooler(torch.cat([z[n:], z_n[n:]], dim=1)), y[n:])


def train_branch(
    model: Classifier,
    names: Sequence[str],
    new: Labelled,
    settings: Stage1,
    *,
    exemplars: Labelled | None = None,
    where: str = "last",
    seed: int = 0,
    views: int = 0,
    exemplar_views: int | None = None,
    exemplar_share: float = 1.0,
    augmentation: Augmentation | None = None,
    cache_limit: int | None = None,
    compressed: bool = False,
    held_out: tuple[Labelled, Labelled | None] | None = None,
    device: torch.device,
    checkpoint: Path | None = None,
    on_progress: OnProgress = silent,
) -> tuple[Step, list[float]]:
    """Train a branch and a head for the classes `names`; returns them with the mean loss of every epoch.

    `views` > 0 caches the trunk's outputs for that many augmented views of each new image, and for `exemplar_views` of
    each exemplar; 0 runs the trunk live. A batch has `exemplar_share` exemplars for every new image, or more where new
    images are few (`batch_sizes`). Training ends once the loss on `held_out` images, new and old, stops improving. One
    class without exemplars is not trained: its head is at the mean of its features.
    """
    start = branch_point(model.backbone, where).start
    sources = [new, exemplars] if settings.replay and exemplars is not None else [new]
    trained = initial_branch(
        model,
        names,
        new,
        where,
        settings=settings,
        exemplars=len(sources) > 1,
        seed=seed,
        device=device,
        on_progress=on_progress,
    )
    if len(names) == 1 and len(sources) == 1:
        # The cross-entropy over one class is 0; distillation alone would move the features away from the head's mean.
        return Step(tuple(names), where, start, trained.branch, trained.head), [0.0]
    frozen = Frozen(model, start, settings, augmentation=augmentation, device=device)
    trunk = TrunkOutputs(
        frozen, [source.images for source in sources], views, exemplar_views, limit=cache_limit, compressed=compressed,
        checkpoint=checkpoint, seed=seed, on_progress=on_progress,
    )  # fmt: skip
    labels = [torch.from_numpy(source.labels).to(device) for source in sources]
    sizes = [len(source.labels) for source in sources]
    optimisation, in_batch = training_settings(trained, settings, sizes, exemplar_share)

    def epoch_batches(epoch: int) -> Iterator[Batch]:
        orders = epoch_orders(sizes, in_batch, seed, epoch)
        chosen = zip(*(on_device(order, device) for order in orders), strict=True)
        for (x, z), indices in zip(trunk.batches(epoch, orders), chosen, strict=True):
            y = torch.cat([of[index] for of, index in zip(labels, indices, strict=True)])
            yield Batch(x, z, y, optimisation.batch)

    losses = fit(
        trained.train(),
        trained.trained_parameters(),
        epoch_batches,
        max(sizes[0] // optimisation.batch, 1),
        lambda batch: stage1_loss(batch, trained, settings),
        optimisation,
        device=device,
        work="Training the new branch",
        checkpoint=checkpoint,
        held_out_loss=HeldOut(trained, frozen, *held_out, compressed=compressed) if held_out else None,
        split=Batch.split,
        on_progress=on_progress,
    )
    return Step(tuple(names), where, start, trained.branch, trained.head, correction=trained.correction), losses


AT_ONCE = 64
"""Held-out images in one forward pass on a CPU: with more, tensors do not fit into memory that training has freed."""


class HeldOut:
    """The cross-entropy of stage I on images that are not trained with; `compressed` keeps feature maps in 8 bits."""

    def __init__(
        self, trained: NewBranch, frozen: Frozen, new: Labelled, old: Labelled | None, *, compressed: bool
    ) -> None:
        self.trained, self.frozen, self.compressed = trained, frozen, compressed
        self.parts = [new] if old is None else [new, old]

    @cached_property
    def batch(self) -> Batch:
        """What the frozen part makes of the images, computed when it is first needed."""
        give_back_memory()  # of training, and then of the frozen part
        images = [part.images for part in self.parts]
        batches = (batch for of in images for batch in of.plain(in_order(len(of), forward_batch(of, CHUNK))))
        found = [[as_cached(output, compressed=self.compressed) for output in self.frozen(batch)] for batch in batches]
        x, z = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        y = torch.from_numpy(np.concatenate([part.labels for part in self.parts])).to(x.device)
        self.frozen.close()
        give_back_memory()
        return Batch(x, z, y, len(self.parts[0].labels))

    @torch.no_grad()
    def __call__(self) -> float:
        self.trained.eval()
        size = AT_ONCE if self.batch.x.device.type == "cpu" else CHUNK
        chunks = (as_computed(x) for x in torch.split(self.batch.x, size))
        h = torch.cat([self.trained.features(x) for x in chunks])
        corrected = replace(self.batch, z=self.trained.corrected(self.batch.z, h))
        loss = cross_entropy(self.trained.head(h), corrected, self.trained).item()
        self.trained.train()
        give_back_memory()  # or the heap grows from epoch to epoch
        return loss


def training_settings(
    trained: NewBranch, settings: Stage1, sizes: Sequence[int], exemplar_share: float
) -> tuple[Optimisation, list[int]]:
    """How a branch is trained with so many new images and exemplars, and how many of each a batch has."""
    optimisation = scale_to_dataset(settings.optimisation, sizes[0])
    pool = 0.0
    if settings.replay and isinstance(trained.head, nn.Linear):
        optimisation = replace(optimisation, lr=optimisation.lr * settings.linear_rate)
        pool = settings.linear_pool
    return optimisation, batch_sizes(sizes, optimisation.batch, exemplar_share, pool, settings.optimisation.batch)


def batch_sizes(sizes: Sequence[int], batch: int, share: float, pool: float, most: int) -> list[int]:
    """How many new images a batch has, and how many exemplars if there are any; `sizes` has the numbers of both.

    `share` exemplars for every new image; more where an epoch would draw less than `pool` of all exemplars, up to
    `most`.
    """
    steps = max(sizes[0] // batch, 1)
    return [batch] + [max(1, round(batch * share), min(math.ceil(pool * size / steps), most)) for size in sizes[1:]]


def epoch_orders(sizes: Sequence[int], in_batch: Sequence[int], seed: int, epoch: int) -> list[list[Ints]]:
    """Which images each batch of an epoch has: new ones, and exemplars where there are any."""
    orders = [shuffled(sizes[0], in_batch[0], seed_for(seed, epoch, 0), drop_last=True)]
    for size, drawn in zip(sizes[1:], in_batch[1:], strict=True):
        orders.append(draws(size, drawn, len(orders[0]), seed_for(seed, epoch, 1)))
    return orders


def draws(count: int, size: int, batches: int, seed: int) -> list[Ints]:
    """`batches` batches of `size` positions, each position as often as any other, give or take one."""
    rng = np.random.default_rng(seed)
    rounds = -(-size * batches // count)
    order = np.concatenate([rng.permutation(count) for _ in range(rounds)])
    return [order[n * size : (n + 1) * size] for n in range(batches)]
