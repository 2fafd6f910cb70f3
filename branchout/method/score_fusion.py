"""Score fusion: the fused logits and their loss (paper, section 4.2).

α and β exist in stage II only; inference has no such numbers.

Symbols: h_d at norm 4 → `u` · z_d → `z` · W_dd' → `deltas` · z̃_d = z_d + Δz_d → `fused_columns` · pooled z̃_a →
`Pooler` · L_cls, L_rt-bal, L_total → `classification_loss`, `routing_loss`, `stage2_loss` · W_r,aux → `router`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import Pooler, delta_inputs, head_bias, to_norm


@dataclass(frozen=True)
class Stage2Data:
    """What stage II sees of one exemplar seed: features at norm 4 and frozen logits of V views of N images."""

    u: Tensor  # (V, N, feature vectors, k)
    z: Tensor  # (V, N, columns)
    labels: Tensor  # (N,) class numbers
    origin: Tensor  # (N,) 0 for images of the base, t for those of step t


@dataclass(frozen=True)
class HeadLayout:
    """The heads side by side: their label space, the feature vector that each reads, the pooler and the biases."""

    space: LabelSpace
    feature_of: tuple[int, ...]
    pooler: str = "max"
    bias: Tensor | None = None
    """(columns,) the part of the frozen logits that β does not scale; None for cosine heads."""


def head_layout(model: Classifier) -> HeadLayout:
    biases = [b for head in model.fused.heads if (b := head_bias(head)) is not None]  # type: ignore[arg-type]
    bias = torch.cat(biases) if biases else None  # all heads are of one kind: see `new_head`
    return HeadLayout(model.space, model.fused.feature_of, model.fused.pooler.kind, bias)


@torch.no_grad()
def stage2_data(model: Classifier, features: Tensor, labels: Tensor, origin: Tensor) -> Stage2Data:
    """What stage II reads, from cached features (V, N, feature vectors, k)."""
    return Stage2Data(to_norm(features), model.fused.frozen_columns(features.unbind(2)), labels, origin)


def fused_columns(
    layout: HeadLayout,
    batch: Stage2Data,
    deltas: Sequence[Tensor],
    grid: Sequence[tuple[float, float]],
    beta_on_head: bool,
) -> Tensor:
    """z̃ in training, for all seeds and points: (seeds, n, points, columns).

    For an image of the base, β scales the features that enter W_bd'. Scaling the product is the same, so one product
    serves all values of β. With `beta_on_head` it also scales new branches' features where they enter their own heads,
    and the deltas of other new branches. Corrections that our recipe learned in earlier steps are part of `batch.z`; β
    leaves those in the base's columns as they are.
    """
    beta = torch.tensor([point[1] for point in grid]).to(batch.u)
    is_base = (batch.origin == 0)[:, :, None]  # (seeds, n, 1)
    scale = torch.where(is_base, beta, torch.ones_like(beta))[..., None]  # (seeds, n, points, 1)
    parts = []
    for d, (delta, read) in enumerate(zip(deltas, delta_inputs(layout.feature_of), strict=True)):
        own = layout.space.slice_of(d)
        z = batch.z[:, :, None, own]
        if d == 0:
            # One pass over the largest tensor instead of two.
            parts.append(torch.addcmul(z, _product(batch.u[:, :, read], delta), scale))
            continue
        if beta_on_head:
            bias = 0.0 if layout.bias is None else layout.bias[own]
            z = (z - bias) * scale + bias
            k = batch.u.shape[-1]  # the base's features are read first
            change = _product(batch.u[:, :, read[:1]], delta[:, :k])
            if len(read) > 1:
                change = torch.addcmul(change, _product(batch.u[:, :, read[1:]], delta[:, k:]), scale)
        else:
            change = _product(batch.u[:, :, read], delta)
        parts.append(z + change)
    return torch.cat(parts, dim=-1)


def _product(u: Tensor, delta: Tensor) -> Tensor:
    """(seeds, n, sources, k), (seeds, sources · k, points, width) → (seeds, n, points, width)."""
    seeds, inputs, points, width = delta.shape
    flat = delta.reshape(seeds, inputs, points * width)
    return torch.bmm(u.flatten(2), flat).view(seeds, -1, points, width)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_cls of every seed and point: (seeds, n, points, classes), (seeds, n) → (seeds, points)."""
    target = labels[:, :, None].expand(logits.shape[:-1])
    # torch's own loss passes over the logits a third as often as logsumexp and gather.
    losses = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
    return losses.view(target.shape).mean(1)


def routing_loss(space: LabelSpace, columns: Tensor, origin: Tensor, router: Tensor | None) -> Tensor:
    """L_rt-bal: which split an image came from, by each branch's largest logit before pooling.

    Every split has weight 1/(t+1), whatever its number of images; one that the batch lacks contributes nothing.
    """
    branches = len(space.branches)
    parts = torch.split(columns, [len(names) for names in space.branches], dim=-1)
    # The gradient of max goes to one column; that of amax compares all of them again, in several passes.
    maxima = torch.stack([part.max(-1).values for part in parts], dim=-1)
    if router is not None:
        maxima = torch.einsum("sngb,sgbr->sngr", maxima, router)
    target = origin[:, :, None].expand(maxima.shape[:-1])
    loss = -F.log_softmax(maxima, dim=-1).gather(-1, target[..., None]).squeeze(-1)  # (seeds, n, points)
    member = F.one_hot(origin, branches).to(loss)  # (seeds, n, splits)
    weight = member / (member.sum(1, keepdim=True).clamp(min=1) * branches)
    return torch.einsum("sng,snr->sg", loss, weight)


def stage2_loss(
    space: LabelSpace, batch: Stage2Data, columns: Tensor, alpha: Tensor, pooler: Pooler, router: Tensor | None
) -> Tensor:
    """L_total = (1 - α)·L_cls + α·L_rt-bal of every seed and point, from z̃ before pooling: (seeds, points)."""
    classification = classification_loss(pooler(columns), batch.labels)
    return (1 - alpha) * classification + alpha * routing_loss(space, columns, batch.origin, router)
