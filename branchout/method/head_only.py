"""A new head on the base's own features, where nothing is cloned (`--branch fc`; paper, section 5.2, "fc-only").

Only W_n is trained, so the loss of stage I is convex in it and is minimised to the end by L-BFGS over all images at
once, instead of some epochs of SGD. Distillation is left out: it trains features, and here they are frozen.

Symbols: h_b → `batch.x` · z_b → `batch.z` · W_n → `trained.head`
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from branchout.errors import BranchoutError
from branchout.method.frozen import Frozen
from branchout.method.new_branch import Labelled, NewBranch, initial_branch
from branchout.method.recipes import HEAD_DECAY, HEAD_ITERATIONS, Stage1
from branchout.method.stage1 import Batch, cross_entropy
from branchout.method.trunk_cache import TrunkOutputs
from branchout.model.classifier import Classifier, Step
from branchout.training import processes
from branchout.training.loop import Event, OnProgress, silent


def train_head(
    model: Classifier,
    names: Sequence[str],
    new: Labelled,
    settings: Stage1,
    *,
    exemplars: Labelled | None = None,
    seed: int = 0,
    views: int,
    exemplar_views: int | None,
    cache_limit: int | None = None,
    device: torch.device,
    on_progress: OnProgress = silent,
) -> tuple[Step, list[float]]:
    """Train a head for the classes `names` on the base's features; returns it with the loss before and after.

    `views` augmented views of each new image, and `exemplar_views` of each exemplar, are cached, or as many as fit
    under `cache_limit` bytes.
    """
    trained = initial_branch(
        model, names, new, "fc", settings=settings, seed=seed, device=device, on_progress=on_progress
    )
    step = Step(tuple(names), "fc", len(model.backbone.names), trained.branch, trained.head)
    if len(names) == 1 and exemplars is None:  # the loss over one class is 0: the head stays at the class's mean
        return step, [0.0, 0.0]
    sources = [new] if exemplars is None else [new, exemplars]
    frozen = Frozen(model, step.start, settings, device=device)
    images = [source.images for source in sources]
    trunk = TrunkOutputs(
        frozen, images, views, exemplar_views, limit=cache_limit, live=False, seed=seed, on_progress=on_progress
    )
    labels = [torch.from_numpy(source.labels).to(device) for source in sources]
    return step, minimise(trained, trunk, labels, on_progress)


def minimise(
    trained: NewBranch, trunk: TrunkOutputs, labels: list[Tensor], on_progress: OnProgress = silent
) -> list[float]:
    """Train the head on the cached views of all images; returns the loss before and after."""
    batches = equal_batches(trunk, labels)
    del trunk.tables  # they take as much memory again
    weight = trained.head.weight
    losses: list[float] = []
    with torch.no_grad():
        weight.zero_()
    optimiser = torch.optim.LBFGS(
        trained.head.parameters(), max_iter=HEAD_ITERATIONS, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimiser.zero_grad()
        decay = HEAD_DECAY * weight.square().sum() / len(weight)
        decay.backward()  # type: ignore[no-untyped-call]
        losses.append(decay.item())
        for batch in batches:
            loss = cross_entropy(trained.head(trained.features(batch.x)), batch, trained) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[-1] += loss.item()
        done = min(len(losses), HEAD_ITERATIONS - 1)  # L-BFGS may compute the loss more often than it iterates
        on_progress(Event("Training the new head", done, HEAD_ITERATIONS, {"loss": losses[-1]}))
        return losses[-1]

    with processes.independent():
        optimiser.step(closure)  # type: ignore[no-untyped-call]
    if not torch.isfinite(weight).all():
        raise BranchoutError("The new head has NaN or infinite weights. Check the images with: branchout data FOLDER")
    on_progress(Event("Training the new head", HEAD_ITERATIONS, HEAD_ITERATIONS, {"loss": losses[-1]}))
    return [losses[0], losses[-1]]


def equal_batches(trunk: TrunkOutputs, labels: list[Tensor]) -> list[Batch]:
    """All cached views in batches of equally many new images and equally many exemplars, which bound the memory."""
    count = math.gcd(*trunk.cached_views)
    tables = [[output.chunk(count) for output in outputs] for outputs in trunk.tables]  # complete in every process
    repeats = [views // count for views in trunk.cached_views]
    y = torch.cat([of.repeat(times) for of, times in zip(labels, repeats, strict=True)])
    return [
        Batch(
            torch.cat([x[n] for x, _ in tables]).float(),
            torch.cat([z[n] for _, z in tables]),
            y,
            len(labels[0]) * repeats[0],
        )
        for n in range(count)
    ]
