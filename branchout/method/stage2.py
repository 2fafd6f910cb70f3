"""Stage II: train the deltas W_dd' of all grid points from cached features; all else is frozen (paper, section 4.2).

Only the deltas differ between the points of an α×β grid, so the whole grid is trained in one pass: points are columns
of one matrix product, exemplar seeds can be its batch dimension. Every point is trained exactly as it would be alone.

Symbols: W_dd' → `deltas` · W_r,aux → `router` · (α, β) → `grid` · E ∪ D_n → `data` · the class-balanced subset B →
`class_balanced`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from branchout.data.images import class_balanced
from branchout.errors import BranchoutError
from branchout.method.recipes import Stage2
from branchout.method.score_fusion import HeadLayout, Stage2Data, fused_columns, stage2_loss
from branchout.model.classifier import Classifier
from branchout.model.heads import Pooler, delta_inputs, to_norm
from branchout.training import processes
from branchout.training.loop import learning_rate, seed_for
from branchout.training.out_of_memory import in_parts

MEMORY_LIMIT = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Bytes that one pass may take; a larger grid is trained in several. With more, a CPU is a third slower."""


Grid = Sequence[tuple[float, float]]
"""The values of (α, β)."""


@dataclass(frozen=True)
class TrainedDeltas:
    """Trained deltas of every seed and grid point: per branch a tensor (seeds, points, inputs, |Y_d|)."""

    grid: tuple[tuple[float, float], ...]
    deltas: tuple[Tensor, ...]

    def at(self, seed: int, point: int) -> list[Tensor]:
        return [delta[seed, point] for delta in self.deltas]


@torch.no_grad()
def grid_predictions(model: Classifier, features: Tensor, trained: TrainedDeltas) -> Tensor:
    """The class that every grid point predicts from features (N, feature vectors, k): (points, N)."""
    z = model.fused.frozen_columns(features.unbind(1))
    u = to_norm(features)
    answers = []
    for point in range(len(trained.grid)):
        deltas = trained.at(0, point)
        change = [u[:, read].flatten(1) @ delta for read, delta in zip(model.fused.delta_inputs, deltas, strict=True)]
        answers.append(model.fused.pooler(z + torch.cat(change, dim=1)).argmax(1))
    return torch.stack(answers)


def train_grid(
    layout: HeadLayout,
    data: Sequence[Stage2Data],
    settings: Stage2,
    *,
    seed: int = 0,
    per_class: int = 10,
    memory_limit: int | None = None,
    on_epoch: Callable[[int, int], None] | None = None,
) -> TrainedDeltas:
    """Train all grid points for all exemplar seeds. `data[s]` belongs to seed s; batches are drawn from seed + s.

    Several processes divide the points among them.
    """
    points = _points_per_pass(layout, data, settings, per_class, memory_limit)
    divided = len(settings.grid) >= processes.count()
    own = settings.grid[processes.rank() :: processes.count()] if divided else settings.grid
    chunks = [own[start : start + points] for start in range(0, len(own), points)]
    epochs = settings.optimisation.epochs * len(chunks)
    trained = []
    for number, chunk in enumerate(chunks):
        done = number * settings.optimisation.epochs
        after_epoch = None if on_epoch is None else lambda epoch, done=done: on_epoch(done + epoch, epochs)
        train = partial(_train, layout, data, settings, seed=seed, per_class=per_class, after_epoch=after_epoch)
        trained.append(in_parts(train, chunk, dim=1))
    deltas = tuple(torch.cat([part[d] for part in trained], dim=1) for d in range(len(layout.space.branches)))
    if divided:
        deltas = tuple(processes.gather(each.transpose(0, 1), [len(settings.grid)]).transpose(0, 1) for each in deltas)
    if not all(bool(torch.isfinite(delta).all()) for delta in deltas):
        raise BranchoutError("Stage II diverged: its weights are not finite numbers. Check the images of --memory.")
    return TrainedDeltas(settings.grid, deltas)


def _points_per_pass(
    layout: HeadLayout, data: Sequence[Stage2Data], settings: Stage2, per_class: int, memory_limit: int | None
) -> int:
    """How many grid points fit into the memory of one pass."""
    batch = min(settings.optimisation.batch, per_class * len(layout.space.classes))
    floats = layout.space.columns * batch * len(data) * 12  # logits, their gradients, and what autograd keeps
    floats += sum(len(layout.space.branches[d]) * len(f) for d, f in enumerate(delta_inputs(layout.feature_of))) * (
        data[0].u.shape[-1] * len(data) * 3  # deltas, gradients, momentum
    )
    most = MEMORY_LIMIT.get(data[0].u.device.type, 2 << 30)
    limit = most if memory_limit is None else min(memory_limit, most)
    return max(1, min(len(settings.grid), limit // (floats * data[0].u.element_size())))


def initial_deltas(
    layout: HeadLayout, k: int, seeds: int, points: int, settings: Stage2, seed: int, like: Tensor
) -> list[Tensor]:
    """(seeds, inputs, points, |Y_d|) per branch; all points of a seed start alike."""
    deltas = []
    generator = torch.Generator().manual_seed(seed)
    # torch's default for a linear layer: with two branches that of each W_dd', with more that of one matrix that holds
    # them all, as in the authors' code.
    branches = len(layout.space.branches)
    inputs = k if branches == 2 else k * branches
    for names, read in zip(layout.space.branches, delta_inputs(layout.feature_of), strict=True):
        shape = (seeds, len(read) * k, 1, len(names))
        start = (
            torch.zeros(shape)
            if settings.zero_start
            else (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(inputs)
        )
        deltas.append(start.to(like).expand(-1, -1, points, -1).contiguous().requires_grad_())
    return deltas


def _train(
    layout: HeadLayout,
    data: Sequence[Stage2Data],
    settings: Stage2,
    grid: Grid,
    *,
    seed: int,
    per_class: int,
    after_epoch: Callable[[int], None] | None,
) -> list[Tensor]:
    """Deltas of some grid points, trained side by side: per branch (seeds, points, inputs, |Y_d|)."""
    like = data[0].u
    deltas = initial_deltas(layout, like.shape[-1], len(data), len(grid), settings, seed, like)
    router = initial_router(layout, len(data), len(grid), like) if settings.learned_router else None
    optimisation = settings.optimisation
    optimiser = torch.optim.SGD(
        deltas if router is None else [*deltas, router],
        lr=optimisation.lr,
        momentum=0.9,
        weight_decay=optimisation.weight_decay,
        nesterov=optimisation.nesterov,
        fused=like.device.type in ("cpu", "cuda"),  # one pass over weights, gradients and momentum instead of five
    )
    pooler = Pooler(layout.space, layout.pooler).to(like.device)
    alpha = torch.tensor([point[0] for point in grid]).to(like)
    for epoch in range(optimisation.epochs):
        orders = [
            class_balanced(part.labels.cpu().numpy(), per_class, optimisation.batch, seed=seed_for(seed + s, epoch))
            for s, part in enumerate(data)
        ]
        for step, indices in enumerate(zip(*orders, strict=True)):
            progress = (epoch + step / len(orders[0])) / optimisation.epochs
            optimiser.param_groups[0]["lr"] = learning_rate(optimisation, progress)
            batch = _gather(data, indices, epoch)
            columns = fused_columns(layout, batch, deltas, grid, settings.beta_on_head)
            loss = stage2_loss(layout.space, batch, columns, alpha, pooler, router)
            optimiser.zero_grad(set_to_none=True)
            loss.sum().backward()  # type: ignore[no-untyped-call] # points and seeds share nothing: gradients stay apart
            optimiser.step()
        if after_epoch is not None:
            after_epoch(epoch + 1)
    return [delta.detach().transpose(1, 2).contiguous() for delta in deltas]


def initial_router(layout: HeadLayout, seeds: int, points: int, like: Tensor) -> Tensor:
    """W_r,aux starts as the identity: the branch with the largest maximum is chosen."""
    branches = len(layout.space.branches)
    return torch.eye(branches).to(like).expand(seeds, points, -1, -1).clone().requires_grad_()


def _gather(data: Sequence[Stage2Data], indices: Sequence[np.ndarray], epoch: int) -> Stage2Data:
    """One batch of every seed, stacked: the leading dimension is the seed instead of the view."""
    picks = [torch.from_numpy(index).to(part.labels.device) for index, part in zip(indices, data, strict=True)]
    view = [epoch % len(part.u) for part in data]
    return Stage2Data(
        u=torch.stack([part.u[v][i] for part, v, i in zip(data, view, picks, strict=True)]),
        z=torch.stack([part.z[v][i] for part, v, i in zip(data, view, picks, strict=True)]),
        labels=torch.stack([part.labels[i] for part, i in zip(data, picks, strict=True)]),
        origin=torch.stack([part.origin[i] for part, i in zip(data, picks, strict=True)]),
    )
