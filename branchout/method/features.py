"""Features of every branch, computed once and cached (paper, section 4.1: h_d is frozen after stage I).

Symbols: h_b, h_n1, … → `features`, shape (views, N, feature vectors, k)

A cache file's name is a hash of all that the features depend on (weights, images, settings), and it gets that name only
when it is complete, so that neither a stale nor a half-written file is ever used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images, forward_batch, in_order, part_of
from branchout.data.samples import digest
from branchout.disk_cache import load_cached, store_cached
from branchout.errors import BranchoutError
from branchout.model.classifier import Classifier
from branchout.training import processes
from branchout.training.device import giving_back
from branchout.training.forward import in_full_batches
from branchout.training.loop import Event, OnProgress, seed_for, silent

BATCH = 256
ROWS = 1024
"""Feature vectors whose logits are computed at once: those of ten pseudo-exemplars a class take much memory."""


def weights_digest(*modules: nn.Module) -> str:
    """A hash of all parameters and buffers of some modules."""
    parts: list[str | bytes] = []
    for module in modules:
        for key, tensor in module.state_dict().items():
            parts += [
                key,
                str(tensor.dtype),
                tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            ]
    return digest(*parts)


@torch.no_grad()
def extract(
    model: Classifier,
    images: Images,
    *,
    views: int = 0,
    augmentation: Augmentation | None = None,
    seed: int = 0,
    device: torch.device,
    cache: Path | None = None,
    fingerprint: str = "",
    work: str = "Computing features",
    on_progress: OnProgress = silent,
) -> Tensor:
    """Features (max(views, 1), N, feature vectors, k) of the images, or of `views` augmented views of each.

    With `cache` and the images' `fingerprint` the result is kept on disk and read back memory-mapped.
    """
    augmentation = augmentation or augment.for_kind(model.kind, model.preprocessing.size)
    rounds = max(views, 1)
    key = None
    if cache is not None and fingerprint:
        engine = () if model.engine is None else ("onnxruntime",)
        key = _cache_key(model, fingerprint, repr((views, augmentation, seed, *engine)))
        shape = (rounds, len(images), 1 + max(model.fused.feature_of), model.backbone.features)
        stored = load_cached(cache, key, shape, np.float32)
        if all(processes.from_each(stored is not None)):
            assert stored is not None
            return torch.from_numpy(stored).to(device)
    batches = in_order(len(images), forward_batch(images, BATCH))
    features = []
    for view in range(rounds):
        stream: Iterator[Tensor] = (
            images.views(batches, augmentation, seed_for(seed, view), processes.part())
            if views
            else images.plain(part_of(batches, processes.part()))
        )
        rows: list[Tensor] = []
        for order, batch in zip(batches, giving_back(stream), strict=True):
            found = in_full_batches(model.features, model.backbone.arrange(processes.never_empty(batch)))
            rows.append(torch.stack(found, dim=1).float()[: len(batch)])
            on_progress(Event(work, view * len(images) + int(order[-1]) + 1, rounds * len(images)))
        features.append(processes.gather(torch.cat(rows), [len(batch) for batch in batches]))
    whole = _finite(torch.stack(features))
    if key is not None and processes.local_rank() == 0:
        store_cached(cache, key, whole.cpu().numpy())
    return whole


def _cache_key(model: Classifier, fingerprint: str, settings: str) -> str:
    unseen = repr((model.fused.feature_of, model.arch.get("last_relu", True)))  # not visible in the weights
    weights = weights_digest(model.backbone, model.branches)
    return f"features/{digest(weights, unseen, fingerprint, settings, repr(model.preprocessing))}"


def _finite(features: Tensor) -> Tensor:
    """The features; an error if any is NaN or infinite."""
    broken = int((~torch.isfinite(features)).flatten(2).any(2).any(0).sum())
    if broken:
        raise BranchoutError(
            f"The network gives NaN or infinite features for {broken:,} of {features.shape[1]:,} images. Its weights "
            "are damaged or far too large: load or train the base again."
        )
    return features


@torch.no_grad()
def logit_columns(model: Classifier, features: Tensor) -> npt.NDArray[np.float64]:
    """Logits of every column with corrections, deltas and class means, before the dial (N, columns), from features (N,
    feature vectors, k)."""
    columns = np.empty((len(features), model.space.columns))
    for start in range(0, len(features), ROWS):
        part = features[start : start + ROWS]
        columns[start : start + ROWS] = model.fused.columns(part.unbind(1)).cpu().numpy()
    return columns


@torch.no_grad()
def predictions(model: Classifier, features: Tensor) -> npt.NDArray[np.int64]:
    """Class numbers, from features (N, feature vectors, k)."""
    answers: npt.NDArray[np.int64] = model.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers
