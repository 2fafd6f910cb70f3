"""FeCAM: the clouds of features of different classes differ in shape, so the distance to a class is the Mahalanobis
distance of its own covariance. Few images make a poor covariance: it is shrunk, and reduced to correlations.

Source: Goswami, Liu, Twardowski, van de Weijer: "FeCAM: Exploiting the Heterogeneity of Class Distributions in
Exemplar-Free Continual Learning" (NeurIPS 2023), with γ₁ = γ₂ = 1 and Tukey's λ = ½. Base classes are described by
their exemplars only (`fecam-all`: by all their images). So few have no shape of their own, and beside classes that have
one they would always lose: as in the source's few-shot experiments all classes then share one covariance. Departures:
covariances are shrunk once, means are taken after Tukey's transform, and it is left out where features can be negative;
a class that comes again has one cloud for each of its looks, and the nearer one counts. A mean of n images is off by
noise, which adds about tr(P Σ)/n to every distance from it; that is taken off, since base classes have means of ten
images and new ones of hundreds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import class_features
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Task, on_base
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import Pooler

FEW = 50
"""Classes with fewer images than this have no covariance of their own."""


class MahalanobisHead(nn.Module):
    """Minus the squared Mahalanobis distance to every class."""

    means: Tensor
    noise: Tensor
    precisions: Tensor

    def __init__(
        self, space: LabelSpace, means: Tensor, noise: Tensor, precisions: Tensor, tukey: bool, shared: bool
    ) -> None:
        super().__init__()
        self.register_buffer("means", means)
        self.register_buffer("noise", noise)
        self.register_buffer("precisions", precisions)
        self.tukey = tukey
        self.shared = shared
        self.pooler = Pooler(space, "max")

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the network: a shape that all classes share is one."""
        shapes = self.precisions[:1] if self.shared else self.precisions
        return self.means.numel() + self.noise.numel() + shapes.numel()

    def forward(self, features: Tensor) -> Tensor:
        x = F.normalize(transformed(features.flatten(1), self.tukey), dim=1)
        distances = squared_distances(x, F.normalize(self.means, dim=1), self.precisions)
        return self.pooler(self.noise - distances)  # type: ignore[no-any-return]


def transformed(features: Tensor, tukey: bool) -> Tensor:
    """Tukey's transform √h, which makes skewed features more like a Gaussian's."""
    return features.clamp(min=0).sqrt() if tukey else features


def squared_distances(x: Tensor, means: Tensor, precisions: Tensor) -> Tensor:
    """(x − μ)ᵀ P (x − μ) for every row and column: (N, k), (columns, k), (columns, k, k) → (N, columns)."""
    distances = []
    for mean, precision in zip(means, precisions, strict=True):
        apart = x - mean
        distances.append((apart @ precision * apart).sum(1))
    return torch.stack(distances, dim=1)


def covariance(group: Tensor) -> Tensor:
    """Of features (n, k); a single image has none."""
    centred = group - group.mean(0)
    return centred.T @ centred / max(len(group) - 1, 1)


def shrunk(sigma: Tensor, on: float = 1.0, off: float = 1.0) -> Tensor:
    """Σ + γ₁·V₁·I + γ₂·V₂·(1 − I), with V₁ the mean variance and V₂ the mean of all other entries."""
    k = len(sigma)
    eye = torch.eye(k).to(sigma)
    variance = sigma.diagonal().mean()
    between = (sigma.sum() - sigma.diagonal().sum()) / max(k * (k - 1), 1)
    return sigma + on * variance.clamp(min=1e-8) * eye + off * between * (1 - eye)


def correlations(sigma: Tensor) -> Tensor:
    """Σ(i, j) / (σ(i) σ(j)), which makes covariances of different classes comparable."""
    deviation = sigma.diagonal().sqrt()
    return sigma / (deviation[:, None] * deviation)


def learn(before: Classifier | OnFeatures, task: Task, *, everything: bool = False) -> OnFeatures:
    model, known, groups = class_features.of_base(before, task, everything=everything)
    assert known is None or isinstance(known, MahalanobisHead)
    tukey = all(bool((group >= 0).all()) for group in groups) if known is None else known.tukey
    clouds = [transformed(group, tukey) for group in groups]
    means = torch.stack([cloud.mean(0) for cloud in clouds])
    sigmas = [covariance(cloud.double()) for cloud in clouds]
    few = min(len(cloud) for cloud in clouds) < FEW
    if few:
        sigmas = [torch.stack(sigmas).mean(0)]
    # Inverted in double precision: with few images a covariance has hardly more than its shrinkage.
    precisions = torch.stack(
        [torch.linalg.pinv(correlations(shrunk(sigma)), hermitian=True).float() for sigma in sigmas]
    )
    if few:
        precisions = precisions.expand(len(clouds), -1, -1)
    if known is not None and known.shared:  # a shape that all classes share stays that of the first step
        precisions = known.precisions[-1:].expand(len(clouds), -1, -1)
    noise = mean_noise(clouds, means, sigmas, precisions)
    shared = few if known is None else known.shared
    if known is not None:
        means, noise = torch.cat([known.means, means]), torch.cat([known.noise, noise])
        precisions = torch.cat([known.precisions, precisions])
    return OnFeatures(model, MahalanobisHead(task.space, means, noise, precisions, tukey, shared).to(task.device))


def mean_noise(clouds: list[Tensor], means: Tensor, sigmas: list[Tensor], precisions: Tensor) -> Tensor:
    """tr(P Σ) / (n ‖m‖²) for each cloud of n: what the noise of its normalised mean adds to squared distances."""
    shapes = sigmas if len(sigmas) == len(clouds) else sigmas * len(clouds)
    traces = [(precision * sigma.T).sum() for precision, sigma in zip(precisions, shapes, strict=True)]
    counts = torch.tensor([len(cloud) for cloud in clouds]).to(means)
    return torch.stack(traces).to(means) / (counts * means.square().sum(1).clamp(min=1e-24))


BASELINES = on_base("fecam", "FeCAM", learn)
