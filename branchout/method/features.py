"""The feature cache: what frozen networks make of pictures is computed once and kept.

An array of features has one row per view, picture and feature vector. On disk it bears a name that hashes all it
depends on (weights, pictures, settings) and gets that name only when it is complete, so neither a stale nor a
half-written file is ever used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images, in_order
from branchout.data.samples import digest
from branchout.files import load_cached, store_cached
from branchout.model.classifier import Classifier
from branchout.training.loop import Event, Report, seed_for, silent

BATCH = 500


def weights_digest(*modules: nn.Module) -> str:
    """Identifies all parameters and buffers of some modules."""
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
    work: str = "cache features",
    report: Report = silent,
) -> Tensor:
    """Features (max(views, 1), N, feature vectors, k) of the plain pictures, or of `views` random views of each.

    With `cache` and the pictures' `fingerprint` the result is kept on disk and read back memory-mapped.
    """
    augmentation = augmentation or augment.for_kind(model.kind, model.preprocessing.size)
    shape = (max(views, 1), len(images), 1 + max(model.fused.feature_of), model.backbone.features)
    kept = None
    if cache is not None and fingerprint:
        weights = weights_digest(model.backbone, model.branches)
        key = digest(
            weights,
            repr((model.fused.feature_of, model.arch.get("last_relu", True))),  # which no weight tells
            fingerprint,
            repr((views, augmentation, seed)),
            repr(model.preprocessing),
        )
        kept = f"features/{key}"
        stored = load_cached(cache, kept, shape, np.float32)
        if stored is not None:
            return torch.from_numpy(stored).to(device)
    batches = in_order(len(images), BATCH)
    rounds = []
    for view in range(max(views, 1)):
        pictures: Iterator[Tensor] = (
            images.views(batches, augmentation, seed_for(seed, view)) if views else images.plain(batches)
        )
        rows = []
        for number, batch in enumerate(pictures):
            rows.append(torch.stack(model.features(model.backbone.arrange(batch)), dim=1).float())
            report(Event(work, view * len(batches) + number + 1, max(views, 1) * len(batches)))
        rounds.append(torch.cat(rows))
    features = torch.stack(rounds)
    if kept is not None:
        store_cached(cache, kept, features.cpu().numpy())
    return features
