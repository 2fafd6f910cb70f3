"""Which images fit no class of a model, by their energy −log Σ exp z, and which of those look alike.

`benchmarks/unknown.py` compares the energy with other scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from branchout.labels import Floats, Ints
from branchout.model.classifier import Classifier

FALSE_ALARMS = 0.1
"""The share of known images that the threshold lets count as unknown, by default."""
MOST_GROUPS = 100
"""Above twice as many images not every number of groups is tried."""


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
        logits = model.fused(features.unbind(1)).cpu().double().numpy()
        unit = torch.nn.functional.normalize(features.cpu().double(), dim=2).flatten(1) / features.shape[1] ** 0.5
        return cls(logits, unit.numpy())


def energy(logits: Floats) -> Floats:
    """−log Σ exp z of each image: low where some logit is large, high where the image is like no known class."""
    highest = logits.max(1)
    found: Floats = -highest - np.log(np.exp(logits - highest[:, None]).sum(1))
    return found


def threshold(scores: Floats, false_alarms: float = FALSE_ALARMS) -> float:
    """The score above which an image counts as unknown, from the scores of known images."""
    return float(np.quantile(scores, 1 - false_alarms))


def group(features: Floats) -> Ints:
    """A group number for each image, from 0 in the order of the images: those that look alike share one.

    Ward's linkage of the feature vectors, which have length 1: with average linkage, unusual images were groups of one
    and most others one group. The number of groups is the one with the largest silhouette of cosine distances. It is at
    least two from three images on: a class may be shown as two groups, which can be given the same name.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from sklearn.metrics import silhouette_score

    count = len(features)
    if count < 3:
        return np.arange(count)
    distances = np.clip(1 - features @ features.T, 0, None)
    np.fill_diagonal(distances, 0)
    tree = linkage(np.sqrt(2 * distances[np.triu_indices(count, 1)]), "ward")  # Euclidean distances of unit vectors
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
