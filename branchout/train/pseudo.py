"""Exemplars of old classes when none were kept, made up from what the heads remember.

A head's weight vector points to where its class lies in feature space. Around it new images tell how a class spreads
(their covariance within classes), and how the features of one branch go with those of another (ridge regression).
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchout.model.classifier import Classifier
from branchout.model.fusion import NORM, CosineHead, to_norm

RIDGE = 0.1
"""Ridge strength, as a share of the mean variance of the features."""


@torch.no_grad()
def pseudo_exemplars(
    model: Classifier, new_features: Tensor, new_labels: Tensor, per_class: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Made-up features (M, feature vectors, k), class numbers and origins for every class of every earlier branch.

    `new_features` (N, feature vectors, k) and `new_labels` are those of the newest step's images.
    """
    cosine = isinstance(model.base_head, CosineHead)
    real = to_norm(new_features) if cosine else new_features
    generator = torch.Generator(real.device).manual_seed(seed)
    features, labels, origins = [], [], []
    for branch, head in enumerate(list(model.fused.heads)[:-1]):
        own = model.fused.feature_of[branch]
        length = NORM if cosine else real[:, own].norm(dim=1).mean()
        centres = torch.nn.functional.normalize(head.weight, dim=1) * length  # type: ignore[arg-type]
        spread = within_class_spread(real[:, own], new_labels)
        count = len(centres) * per_class
        noise = torch.randn(count, len(spread), generator=generator, device=real.device, dtype=real.dtype) @ spread
        drawn = centres.repeat_interleave(per_class, 0) + noise
        vectors = [
            drawn if other == own else predict_features(real[:, own], real[:, other], drawn)
            for other in range(real.shape[1])
        ]
        features.append(torch.stack(vectors, dim=1))
        numbers = torch.from_numpy(model.space.index(model.space.branches[branch])).to(real.device)
        labels.append(numbers.repeat_interleave(per_class))
        origins.append(torch.full((count,), branch, device=real.device))
    return torch.cat(features), torch.cat(labels), torch.cat(origins)


def within_class_spread(features: Tensor, labels: Tensor) -> Tensor:
    """A matrix A with AᵀA the covariance within classes, so that standard normal rows times A are noise like it."""
    _, index = torch.unique(labels, return_inverse=True)
    classes = int(index.max()) + 1
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, index, features)
    centred = features - (sums / index.bincount(minlength=classes)[:, None])[index]
    covariance = centred.T @ centred / max(len(features) - classes, 1)
    values, vectors = torch.linalg.eigh(covariance.double())
    spread: Tensor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return spread.to(features.dtype)


def predict_features(source: Tensor, target: Tensor, at: Tensor) -> Tensor:
    """Ridge regression from one branch's features to another's, fitted on real images and read off at `at`."""
    x, y = source.double(), target.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    gram = x.T @ x
    strength = RIDGE * gram.diagonal().mean().clamp(min=1e-12)
    weights = torch.linalg.solve(gram + strength * torch.eye(len(gram), device=x.device, dtype=x.dtype), x.T @ y)
    predicted: Tensor = (at.double() - x_mean) @ weights + y_mean
    return predicted.to(at.dtype)
