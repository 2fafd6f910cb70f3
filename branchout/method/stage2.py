"""Stage II, score fusion: learn the delta blocks W_dd' from cached features; everything else is frozen.

Only the deltas differ between the points of an α×β grid, so the whole grid is trained in one pass: the points stand
side by side as columns of one matrix product, and exemplar seeds as its batch dimension. Every point follows exactly
the path it would follow alone. α and β exist here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.data.images import class_balanced
from branchout.labels import LabelSpace
from branchout.method.recipes import Stage2
from branchout.model.classifier import Classifier
from branchout.model.heads import Pooler, head_bias, sources, to_norm

MEMORY_LIMIT = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Bytes that one pass may take; a larger grid is trained in several. A processor is slower by a third with more: its
caches overflow, and memory for every large tensor is asked of the system anew."""


@dataclass(frozen=True)
class FusionData:
    """What stage II sees of one exemplar seed: everything frozen is already computed.

    `u` are the features at norm 4 and `z` the frozen logits, for each of V augmented views of N samples.
    """

    u: Tensor  # (V, N, feature vectors, k)
    z: Tensor  # (V, N, columns)
    labels: Tensor  # (N,) class numbers
    origin: Tensor  # (N,) 0 for samples of the base, t for those of step t


@dataclass(frozen=True)
class Problem:
    """What is fused: the label space, which feature vector each branch's head reads, pooler and head biases."""

    space: LabelSpace
    feature_of: tuple[int, ...]
    pooler: str = "max"
    bias: Tensor | None = None
    """(columns,) the part of the frozen logits that no feature scaling touches; None for cosine heads."""


def problem_of(model: Classifier) -> Problem:
    """What is to be fused in a model."""
    heads = list(model.fused.heads)
    biases = [head_bias(head) for head in heads]  # type: ignore[arg-type]
    bias = None
    if any(b is not None for b in biases):
        zeros = [head.weight.new_zeros(len(head.weight)) for head in heads]  # type: ignore[operator, arg-type]
        bias = torch.cat([zero if b is None else b for b, zero in zip(biases, zeros, strict=True)])
    return Problem(model.space, model.fused.feature_of, model.fused.pooler.kind, bias)


@torch.no_grad()
def fusion_data(model: Classifier, features: Tensor, labels: Tensor, origin: Tensor) -> FusionData:
    """From cached features (V, N, feature vectors, k) to what stage II reads."""
    return FusionData(to_norm(features), model.fused.frozen_columns(features.unbind(2)), labels, origin)


@torch.no_grad()
def grid_answers(model: Classifier, features: Tensor, fused: Fused, seed: int) -> Tensor:
    """The class that every grid point answers for features (N, feature vectors, k): (points, N)."""
    z = model.fused.frozen_columns(features.unbind(1))
    u = to_norm(features)
    answers = []
    for point in range(len(fused.grid)):
        deltas = fused.at(seed, point)
        change = [u[:, read].flatten(1) @ delta for read, delta in zip(model.fused.sources, deltas, strict=True)]
        answers.append(model.fused.pooler(z + torch.cat(change, dim=1)).argmax(1))
    return torch.stack(answers)


@dataclass(frozen=True)
class Fused:
    """Trained deltas of every seed and grid point: per branch a tensor (seeds, points, inputs, |Y_d|)."""

    grid: tuple[tuple[float, float], ...]
    deltas: tuple[Tensor, ...]

    def at(self, seed: int, point: int) -> list[Tensor]:
        return [delta[seed, point] for delta in self.deltas]


def fuse(
    problem: Problem,
    data: Sequence[FusionData],
    settings: Stage2,
    *,
    seed: int = 0,
    per_class: int = 10,
    memory_limit: int | None = None,
    on_epoch: Callable[[int, int], None] | None = None,
) -> Fused:
    """Train all grid points for all exemplar seeds. `data[s]` belongs to seed s; batches are drawn from seed + s."""
    batch = min(settings.optimisation.batch, per_class * len(problem.space.classes))
    floats = problem.space.columns * batch * len(data) * 12  # logits, their gradients, and what autograd keeps
    floats += sum(len(problem.space.branches[d]) * len(f) for d, f in enumerate(sources(problem.feature_of))) * (
        data[0].u.shape[-1] * len(data) * 3  # deltas, gradients, momentum
    )
    limit = memory_limit or MEMORY_LIMIT.get(data[0].u.device.type, 2 << 30)
    points = max(1, min(len(settings.grid), limit // (floats * data[0].u.element_size())))
    chunks = [settings.grid[start : start + points] for start in range(0, len(settings.grid), points)]
    epochs = settings.optimisation.epochs * len(chunks)
    trained = []
    for number, chunk in enumerate(chunks):
        done = number * settings.optimisation.epochs
        report = None if on_epoch is None else lambda epoch, done=done: on_epoch(done + epoch, epochs)
        trained.append(_train(problem, data, settings, chunk, seed, per_class, report))
    deltas = tuple(torch.cat([part[d] for part in trained], dim=1) for d in range(len(problem.space.branches)))
    return Fused(settings.grid, deltas)


def initial_deltas(
    problem: Problem, k: int, seeds: int, points: int, settings: Stage2, seed: int, like: Tensor
) -> list[Tensor]:
    """(seeds, inputs, points, |Y_d|) per branch; all points of a seed start alike."""
    deltas = []
    generator = torch.Generator().manual_seed(seed)
    # torch's default for a linear layer: after one step of each W_dd' by itself, after several of one matrix that holds
    # them all, as the authors have it.
    branches = len(problem.space.branches)
    inputs = k if branches == 2 else k * branches
    for names, read in zip(problem.space.branches, sources(problem.feature_of), strict=True):
        shape = (seeds, len(read) * k, 1, len(names))
        start = (
            torch.zeros(shape)
            if settings.zero_start
            else (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(inputs)
        )
        deltas.append(start.to(like).expand(-1, -1, points, -1).contiguous().requires_grad_())
    return deltas


def _train(
    problem: Problem,
    data: Sequence[FusionData],
    settings: Stage2,
    grid: Sequence[tuple[float, float]],
    seed: int,
    per_class: int,
    report: Callable[[int], None] | None,
) -> list[Tensor]:
    like = data[0].u
    k = like.shape[-1]
    deltas = initial_deltas(problem, k, len(data), len(grid), settings, seed, like)
    branches = len(problem.space.branches)
    parameters = list(deltas)
    router = None
    if settings.learned_router:
        # Starts as the raw router: the largest maximum wins.
        router = torch.eye(branches).to(like).expand(len(data), len(grid), -1, -1).clone().requires_grad_()
        parameters.append(router)
    optimisation = settings.optimisation
    optimiser = torch.optim.SGD(
        parameters,
        lr=optimisation.lr,
        momentum=0.9,
        weight_decay=optimisation.weight_decay,
        nesterov=optimisation.nesterov,
    )
    pooler = Pooler(problem.space, problem.pooler).to(like.device)
    alpha = torch.tensor([point[0] for point in grid]).to(like)
    for epoch in range(optimisation.epochs):
        orders = [
            class_balanced(part.labels.cpu().numpy(), per_class, optimisation.batch, seed=_mix(seed + s, epoch))
            for s, part in enumerate(data)
        ]
        for indices in zip(*orders, strict=True):
            batch = _gather(data, indices, epoch)
            columns = fused_columns(problem, batch, deltas, grid, settings.beta_on_head)
            pooled = pooler(columns) if problem.space.overlap else columns  # which costs a fifth of the time
            loss = (1 - alpha) * classification_loss(pooled, batch.labels)
            loss = loss + alpha * routing_loss(problem.space, columns, batch.origin, router)
            optimiser.zero_grad(set_to_none=True)
            # Points and seeds share nothing, so their gradients do not mix.
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if report is not None:
            report(epoch + 1)
    return [delta.detach().transpose(1, 2).contiguous() for delta in deltas]


def _mix(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def _gather(data: Sequence[FusionData], indices: Sequence[np.ndarray], epoch: int) -> FusionData:
    """One batch of every seed, stacked: the leading dimension is the seed instead of the view."""
    picks = [torch.from_numpy(index).to(part.labels.device) for index, part in zip(indices, data, strict=True)]
    view = [epoch % len(part.u) for part in data]
    return FusionData(
        u=torch.stack([part.u[v][i] for part, v, i in zip(data, view, picks, strict=True)]),
        z=torch.stack([part.z[v][i] for part, v, i in zip(data, view, picks, strict=True)]),
        labels=torch.stack([part.labels[i] for part, i in zip(data, picks, strict=True)]),
        origin=torch.stack([part.origin[i] for part, i in zip(data, picks, strict=True)]),
    )


def fused_columns(
    problem: Problem,
    batch: FusionData,
    deltas: Sequence[Tensor],
    grid: Sequence[tuple[float, float]],
    beta_on_head: bool,
) -> Tensor:
    """z̃ in training, for all seeds and points: (seeds, n, points, columns).

    For a base sample β scales the features that enter W_bd', which is the same as scaling what comes out: one product
    serves all values of β. With `beta_on_head` it scales new branches' features wherever they enter: their own heads,
    and the deltas between them.
    """
    beta = torch.tensor([point[1] for point in grid]).to(batch.u)
    is_base = (batch.origin == 0)[:, :, None]  # (seeds, n, 1)
    scale = torch.where(is_base, beta, torch.ones_like(beta))[..., None]  # (seeds, n, points, 1)
    parts = []
    for d, (delta, read) in enumerate(zip(deltas, sources(problem.feature_of), strict=True)):
        own = problem.space.slice_of(d)
        z = batch.z[:, :, None, own]
        if d == 0:
            change = _product(batch.u[:, :, read], delta) * scale
        elif beta_on_head:
            bias = 0.0 if problem.bias is None else problem.bias[own]
            z = (z - bias) * scale + bias
            k = batch.u.shape[-1]  # what is read first is the base's
            change = _product(batch.u[:, :, read[:1]], delta[:, :k])
            if len(read) > 1:
                change = change + _product(batch.u[:, :, read[1:]], delta[:, k:]) * scale
        else:
            change = _product(batch.u[:, :, read], delta)
        parts.append(z + change)
    return torch.cat(parts, dim=-1)


def _product(u: Tensor, delta: Tensor) -> Tensor:
    """(seeds, n, sources, k), (seeds, sources · k, points, width) → (seeds, n, points, width)."""
    seeds, inputs, points, width = delta.shape
    flat = delta.reshape(seeds, inputs, points * width)
    return torch.bmm(u.flatten(2), flat).view(seeds, -1, points, width)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_cls of every seed and point: (seeds, n, points, classes), (seeds, n) → (seeds, points)."""
    chosen = logits.gather(-1, labels[:, :, None, None].expand(-1, -1, logits.shape[2], 1)).squeeze(-1)
    return (logits.logsumexp(-1) - chosen).mean(1)


def routing_loss(space: LabelSpace, columns: Tensor, origin: Tensor, router: Tensor | None) -> Tensor:
    """L_rt-bal: which split a sample came from, read from each branch's largest logit before pooling.

    Every split weighs 1/(t+1), whatever its number of samples; one that the batch lacks contributes nothing.
    """
    branches = len(space.branches)
    parts = torch.split(columns, [len(names) for names in space.branches], dim=-1)
    maxima = torch.stack([part.amax(-1) for part in parts], dim=-1)
    if router is not None:
        maxima = torch.einsum("sngb,sgbr->sngr", maxima, router)
    target = origin[:, :, None].expand(maxima.shape[:-1])
    loss = -F.log_softmax(maxima, dim=-1).gather(-1, target[..., None]).squeeze(-1)  # (seeds, n, points)
    member = F.one_hot(origin, branches).to(loss)  # (seeds, n, splits)
    weight = member / (member.sum(1, keepdim=True).clamp(min=1) * branches)
    return torch.einsum("sng,snr->sg", loss, weight)
