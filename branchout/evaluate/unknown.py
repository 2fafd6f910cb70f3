"""Which images fit no class of a model: a score for each image, and the threshold that known images set.

Of every score a larger value means that the image is less like the known classes. `softmax` and `energy` need the
logits alone; `mean` and `knn` also need labelled images of known classes, such as those of `--memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchout.errors import BranchoutError
from branchout.model.classifier import Classifier

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FALSE_ALARMS = 0.1
"""The share of known images that the threshold lets count as unknown."""
DEFAULT_SCORE = "energy"
"""The best AUROC on the development classes of `benchmarks/unknown.py`, averaged over both datasets."""
NEIGHBOURS = 3
"""Of the score `knn`."""


@dataclass(frozen=True)
class Outputs:
    """What a model computes for some images."""

    logits: Floats
    """(images, classes)"""
    features: Floats
    """(images, k): the feature vectors of all branches, each of length 1, then together of length 1."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: Classifier, features: Tensor) -> Outputs:
        """From the features that `extract` returns: (images, feature vectors, k)."""
        logits = model.fused(features.unbind(1)).double().cpu().numpy()
        unit = torch.nn.functional.normalize(features.double(), dim=2).flatten(1) / features.shape[1] ** 0.5
        return cls(logits, unit.cpu().numpy())


@dataclass(frozen=True)
class KnownImages:
    """Labelled images of known classes."""

    outputs: Outputs
    labels: Ints


def score(kind: str, images: Outputs, known: KnownImages | None = None) -> Floats:
    """One number for each image. For the known images themselves see `score_known`."""
    function = SCORES[kind]
    if kind in NEED_IMAGES and known is None:
        raise BranchoutError(f"The score {kind!r} needs labelled images of known classes: --memory OLD/")
    return function(images, known)


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
        raise BranchoutError("A threshold needs at least two images of some known class. Add images to --memory.")
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


def threshold(scores: Floats, false_alarms: float = FALSE_ALARMS) -> float:
    """The score above which an image counts as unknown, from the scores of known images."""
    return float(np.quantile(scores, 1 - false_alarms))


def _softmax(images: Outputs, _: KnownImages | None) -> Floats:
    shifted = np.exp(images.logits - images.logits.max(1, keepdims=True))
    found: Floats = 1 - 1 / shifted.sum(1)
    return found


def _energy(images: Outputs, _: KnownImages | None) -> Floats:
    """−log Σ exp z: low where some logit is large."""
    highest = images.logits.max(1)
    found: Floats = -highest - np.log(np.exp(images.logits - highest[:, None]).sum(1))
    return found


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


# Groups.

MOST_GROUPS = 100
"""Above twice as many images not every number of groups is tried."""


def group(features: Floats) -> Ints:
    """A group number for each image, from 0 in the order of the images: those that look alike share one.

    Average linkage of cosine distances; the number of groups is the one with the largest silhouette. It is at least
    two from three images on: a class may be shown as two groups, which can be given the same name.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from sklearn.metrics import silhouette_score

    count = len(features)
    if count < 3:
        return np.arange(count)
    distances = np.clip(1 - features @ features.T, 0, None)
    np.fill_diagonal(distances, 0)
    tree = linkage(distances[np.triu_indices(count, 1)], "average")
    most = max(2, count // 2)
    best, found = -2.0, np.zeros(count, dtype=np.int64)
    for number in np.unique(np.linspace(2, most, min(most - 1, MOST_GROUPS)).round().astype(int)):
        groups = fcluster(tree, number, "maxclust")
        if not 1 < len(np.unique(groups)) < count:
            continue
        quality = float(silhouette_score(distances, groups, metric="precomputed"))
        if quality > best:
            best, found = quality, groups
    _, first, numbers = np.unique(found, return_index=True, return_inverse=True)
    in_order: Ints = np.argsort(np.argsort(first))[numbers].astype(np.int64)
    return in_order
