"""A second classifier of the new classes, computed from their mean features (not in the paper).

From a dozen images a class, a branch learns to tell them apart less well than its features allow. Later steps have a
harder case: every head learned its classes beside a few kept images of the others. Class means μ_c and one covariance Σ
in each branch's features h, scaled to length 1, treat all new classes alike:

    s_c(h) = μ_cᵀ A h − ½ (μ_cᵀ A μ_c − tr(A Σ)/n_c),   A = (Σ + γ·tr(Σ)/k·I)⁻¹

which is linear discriminant analysis with a regularised covariance. The last term is what chance adds to μ_cᵀ A μ_c if
the mean is that of n_c images; without it, a class with five kept images would lose to one with fifty. The mean of all
branches' scores is scaled to the spread of the trained logits, and `model.class_means` mixes both so that only the
choice among new classes changes. Held-out images choose the share of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.method.recipes import COVARIANCE_RIDGE, MEANS_SHARE
from branchout.model.class_means import ClassMeans
from branchout.model.classifier import Classifier
from branchout.training.device import in_double


@torch.no_grad()
def class_means(model: Classifier, features: Tensor, labels: Tensor, biases: list[float]) -> ClassMeans | None:
    """From features (N, feature vectors, k) of images of the new classes and their class numbers.

    `biases` are those of the steps at the point where old and new classes are balanced. None where there is one new
    class only, one without an image, or no class with two, so that nothing is known about the spread within a class.
    """
    space, h = model.space, features.unbind(1)
    first = len(space.branches[0])
    level = torch.tensor([0.0, *biases])[torch.from_numpy(space.branch_of_column[first:])].to(features)
    member = in_double((labels[:, None] == new_classes(model, labels)).float())  # (N, columns)
    counts = member.sum(0)
    if len(counts) < 2 or (counts == 0).any() or (counts < 2).all():
        return None
    parts = [discriminant(F.normalize(in_double(each), dim=-1), member) for each in h]
    weight, bias = torch.cat([part[0] for part in parts], 1), torch.stack([part[1] for part in parts]).sum(0)
    spread = centred(model.fused.columns(h)[:, first:] + level).std().item() / len(parts)
    return ClassMeans.of(weight * spread, bias * spread, level.to(weight.device), 0.0).to(features.device)


@torch.no_grad()
def choose_share(means: ClassMeans, model: Classifier, features: Tensor, labels: Tensor) -> float:
    """How much the class means should count, from held-out images of new classes.

    Of the shares that lose less than one standard error of accuracy against the best, the one nearest to `MEANS_SHARE`:
    few images cannot tell them apart.
    """
    shares = [step / 10 for step in range(10)]
    z = model.fused.columns(features.unbind(1))[:, len(model.space.branches[0]) :]
    right = [
        (new_classes(model, labels)[(means.at(share)(z, features.unbind(1)) + means.level).argmax(1)] == labels)
        .float()
        .mean()
        .item()
        for share in shares
    ]
    best = max(right)
    p = (len(labels) * best + 1) / (len(labels) + 2)  # not 1 where all of a few images are right
    error = (p * (1 - p) / (len(labels) + 2)) ** 0.5
    close = [share for share, each in zip(shares, right, strict=True) if each >= best - error]
    return min(close, key=lambda share: abs(share - MEANS_SHARE))


def new_classes(model: Classifier, like: Tensor) -> Tensor:
    """The class number of each column of the new branches."""
    return torch.from_numpy(model.space.class_of_column[len(model.space.branches[0]) :]).to(like)


def discriminant(u: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (columns, k) and biases of linear discriminant analysis, for scores with a spread of 1 on these images.

    `u` are features (N, k), `member` is 1 where an image is of a column's class (N, columns).
    """
    k = u.shape[1]
    counts = member.sum(0)
    means = (member / counts).T @ u
    image, column = member.nonzero(as_tuple=True)
    within = u[image] - means[column]
    covariance = within.T @ within / (len(within) - len(means))
    ridge = COVARIANCE_RIDGE * covariance.trace() / k + 1e-12
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance + ridge * torch.eye(k).to(u)))
    weight = means @ inverse
    bias = ((inverse * covariance).sum() / counts - (weight * means).sum(1)) / 2
    weight, bias = weight - weight.mean(0), bias - bias.mean()  # what all classes share decides nothing
    scores = u @ weight.T + bias
    spread = centred(scores).std()
    if spread <= 1e-9 * scores.abs().max():  # all classes have the same images
        return torch.zeros_like(weight), torch.zeros_like(bias)
    return weight / spread, bias / spread


def centred(scores: Tensor) -> Tensor:
    """Without the mean over all columns, which moves no decision among them."""
    return scores - scores.mean(1, keepdim=True)
