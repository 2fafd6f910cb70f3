"""Scores of images that fit no class: `benchmarks.unknown` compares them.

Of every score a larger value means that the image is less like the known classes. `softmax` and `energy` need the
logits alone; `mean` and `knn` also need labelled images of known classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from branchout.errors import BranchoutError
from branchout.evaluate.unknown import Outputs, energy
from branchout.labels import Floats, Ints

NEIGHBOURS = 3
"""Of the score `knn`."""


@dataclass(frozen=True)
class KnownImages:
    """Labelled images of known classes."""

    outputs: Outputs
    labels: Ints


def score(kind: str, images: Outputs, known: KnownImages | None = None) -> Floats:
    """One number for each image. For the known images themselves see `score_known`."""
    return SCORES[kind](images, known)


def score_known(kind: str, known: KnownImages) -> Floats:
    """The scores of the known images themselves: each is compared with the others only.

    An image that is the only one of its class is left out of `mean` and `knn`, where nothing of its class remains.
    """
    if kind not in NEED_IMAGES:
        return SCORES[kind](known.outputs, None)
    features, labels = known.outputs.features, known.labels
    counts = np.bincount(labels)
    kept = counts[labels] > 1
    if not kept.any():
        raise BranchoutError("A threshold needs at least two images of some known class.")
    similarity = features @ features.T
    np.fill_diagonal(similarity, -np.inf)
    if kind == "knn":
        return (1 - _nearest(similarity))[kept]
    sums = _sums(features, labels)
    to_means = features @ _unit(sums).T
    rows = np.arange(len(features))
    to_means[rows, labels] = (features * _unit(sums[labels] - features)).sum(1)
    found: Floats = (1 - to_means.max(1))[kept]
    return found


def _softmax(images: Outputs, _: KnownImages | None) -> Floats:
    shifted = np.exp(images.logits - images.logits.max(1, keepdims=True))
    found: Floats = 1 - 1 / shifted.sum(1)
    return found


def _energy(images: Outputs, _: KnownImages | None) -> Floats:
    return energy(images.logits)


def _mean(images: Outputs, known: KnownImages | None) -> Floats:
    """1 − the cosine with the nearest mean of a class."""
    assert known is not None
    found: Floats = 1 - (images.features @ _unit(_sums(known.outputs.features, known.labels)).T).max(1)
    return found


def _knn(images: Outputs, known: KnownImages | None) -> Floats:
    """1 − the mean cosine with the nearest known images."""
    assert known is not None
    return 1 - _nearest(images.features @ known.outputs.features.T)


def _nearest(similarity: Floats) -> Floats:
    count = min(NEIGHBOURS, similarity.shape[1] - 1) or 1
    found: Floats = np.partition(similarity, -count, axis=1)[:, -count:].mean(1)
    return found


def _sums(features: Floats, labels: Ints) -> Floats:
    sums = np.zeros((labels.max() + 1, features.shape[1]))
    np.add.at(sums, labels, features)
    return sums


def _unit(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    found: Floats = rows / np.maximum(lengths, 1e-12)
    return found


SCORES: Mapping[str, Callable[[Outputs, KnownImages | None], Floats]] = {
    "softmax": _softmax,
    "energy": _energy,
    "mean": _mean,
    "knn": _knn,
}
NEED_IMAGES = frozenset({"mean", "knn"})
