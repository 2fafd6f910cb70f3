"""Pseudo-exemplars: features that stand for old classes of which no images were kept (our addition).

The row of a head points to where its class lies in feature space, but real images lie some way off. How far is
measured on new images that did not train: the cosines between their features and their own new rows. In which
directions they deviate is measured on new images too (the covariance within classes), and so is how the features of
one branch follow from those of another (ridge regression).

The cosines matter most. Features that lie on their row are classified too well, and a dial chosen with them assigns
base images to new classes.

Symbols: W_d → `head.weight` · h_d → `vectors` · h_d' → `predict_features` · E → `Exemplars`
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.method.recipes import RIDGE
from branchout.model.classifier import Classifier
from branchout.training.device import in_double


class Exemplars(NamedTuple):
    features: Tensor  # (M, feature vectors, k)
    labels: Tensor  # (M,) class numbers
    origin: Tensor  # (M,) the branch that each belongs to

    def without(self, classes: Tensor) -> Exemplars:
        """Those of other classes."""
        kept = ~torch.isin(self.labels, classes)
        if kept.all():
            return self
        return Exemplars(self.features[kept], self.labels[kept], self.origin[kept])


@torch.no_grad()
def pseudo_exemplars(
    model: Classifier, new: tuple[Tensor, Tensor], calibration: tuple[Tensor, Tensor], per_class: int, seed: int
) -> Exemplars:
    """Pseudo-exemplars of every class of every earlier branch.

    `new` and `calibration` are features (N, feature vectors, k) and class numbers of images of the newest step: those
    it was trained on, and others.
    """
    features, labels = new
    generator = torch.Generator(features.device).manual_seed(seed)
    made, numbers, origins = [], [], []
    for branch, head in enumerate(list(model.fused.heads)[:-1]):
        own = model.fused.feature_of[branch]
        cosines = alignment(model, *calibration, branch)
        rows = F.normalize(head.weight, dim=1)  # type: ignore[arg-type]
        spread = within_class_spread(F.normalize(features[:, own], dim=1), labels)
        vectors = vectors_at_cosine(rows.repeat_interleave(per_class, 0), cosines, spread, generator)
        vectors *= features[:, own].norm(dim=1).mean()
        of_branch = vectors.new_empty(len(vectors), *features.shape[1:])
        for f in range(features.shape[1]):
            predicted = vectors if f == own else predict_features(features[:, own], features[:, f], vectors)
            of_branch[:, f] = predicted
        made.append(of_branch)
        known = torch.from_numpy(model.space.index(model.space.branches[branch])).to(rows.device)
        numbers.append(known.repeat_interleave(per_class))
        origins.append(torch.full((len(vectors),), branch, device=rows.device))
    joined = made[0] if len(made) == 1 else torch.cat(made)
    return Exemplars(joined, torch.cat(numbers), torch.cat(origins))


def vectors_at_cosine(rows: Tensor, cosines: Tensor, spread: Tensor, generator: torch.Generator) -> Tensor:
    """A unit vector for each row, at one of these cosines to it; in place: there are ten for each of 1,000 classes."""
    vectors = torch.randn(len(rows), len(spread), generator=generator, device=rows.device, dtype=rows.dtype) @ spread
    vectors -= (vectors * rows).sum(1, keepdim=True) * rows
    vectors = F.normalize(vectors, dim=1)
    drawn = cosines[torch.randint(len(cosines), (len(rows),), generator=generator, device=rows.device)][:, None]
    vectors *= (1 - drawn**2).clamp(min=0).sqrt()
    vectors += drawn * rows
    return vectors


def alignment(model: Classifier, features: Tensor, labels: Tensor, branch: int = 0) -> Tensor:
    """Cosines between images of an earlier branch and their rows, estimated by those of the newest step.

    For a step's head it is the cosine of each image with its own row. Rows of a linear base head are trained
    differently, so each image's largest cosine with any row of the base counts too: images of the base's own classes
    are at least as near to their rows. The row of a single new class is the mean of its images, so only the base's rows
    count then.
    """
    head = list(model.fused.heads)[-1]
    row_of = torch.full((len(model.space.classes),), -1, dtype=torch.long)
    newest_classes = model.space.branches[-1]
    row_of[torch.from_numpy(model.space.index(newest_classes))] = torch.arange(len(newest_classes))
    rows = row_of.to(labels.device)[labels]
    known = rows >= 0
    h = F.normalize(features[known, model.fused.feature_of[-1]], dim=1)
    own = (h * F.normalize(head.weight, dim=1)[rows[known]]).sum(1)  # type: ignore[arg-type]
    if branch > 0 or not model.has_linear_head:
        return own
    nearest = F.normalize(features[known, 0], dim=1) @ F.normalize(model.base_head.weight, dim=1).T
    return torch.maximum(own, nearest.amax(1)) if len(newest_classes) > 1 else nearest.amax(1)


def within_class_spread(features: Tensor, labels: Tensor) -> Tensor:
    """A matrix A with AᵀA the covariance within classes: standard normal rows times A have that covariance."""
    _, index = torch.unique(labels, return_inverse=True)
    classes = int(index.max()) + 1
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, index, features)
    centred = features - (sums / index.bincount(minlength=classes)[:, None])[index]
    covariance = centred.T @ centred / max(len(features) - classes, 1)
    # A dozen images vary in a dozen directions only, and some row always lies along one of them: shrink.
    share = ledoit_wolf(in_double(centred)) if len(centred) > 1 else 1.0
    level = covariance.diagonal().mean()
    if not level > 0:  # one image of each class: any direction is as likely
        return torch.eye(len(covariance)).to(features)
    covariance = (1 - share) * covariance + share * level * torch.eye(len(covariance)).to(covariance)
    values, vectors = torch.linalg.eigh(in_double(covariance))
    spread: Tensor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return spread.to(features)


def ledoit_wolf(centred: Tensor) -> float:
    """The best share of the identity in a covariance matrix (Ledoit and Wolf, 2004); scikit-learn's takes 100 MB."""
    n, width = centred.shape
    lengths = centred.square().sum(1)
    squares = (centred.T @ centred).square().sum() / n**2
    distance = squares / width - (lengths.sum() / (n * width)) ** 2
    noise = (lengths.square().sum() / n - squares) / (n * width)
    return float((noise / distance).clamp(0, 1)) if distance > 0 else 0.0


def predict_features(source: Tensor, target: Tensor, at: Tensor) -> Tensor:
    """Ridge regression from one branch's features to another's, fitted on real images and evaluated at `at`."""
    x, y = in_double(source), in_double(target)
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    gram = x.T @ x
    strength = RIDGE * gram.diagonal().mean().clamp(min=1e-12)
    weights = torch.linalg.solve(gram + strength * torch.eye(len(gram), device=x.device, dtype=x.dtype), x.T @ y)
    parts = [((in_double(part) - x_mean) @ weights).add_(y_mean).to(at) for part in torch.split(at, 1024)]
    return torch.cat(parts)
