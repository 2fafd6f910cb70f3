"""Heads, and how several of them are fused into one: frozen heads, deltas, dial, pooler (paper, section 4.2).

Branch d computes logits z_d from its features h_d with its own frozen head. A later branch may correct z_d: in stage I
it learned what to add to it. Fusion adds Δz_d, a linear map of the *other* branches' features, adds one number b (the
dial) to the logits of the new branches, and pools the columns of the same class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.errors import BranchoutError, unknown
from branchout.goals import POOLERS
from branchout.labels import LabelSpace, branch_name
from branchout.model.class_means import ClassMeans

NORM = 4.0
"""Features and class weights are scaled to this length, so that a logit is 16·cos."""


def to_norm(vectors: Tensor) -> Tensor:
    """Vectors along the last dimension, scaled to length 4."""
    return F.normalize(vectors, dim=-1) * NORM


class CosineHead(nn.Module):
    """Logits 16·cos(h, w): both sides normalised, no bias."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, h: Tensor) -> Tensor:
        return to_norm(h) @ to_norm(self.weight).T


Head = CosineHead | nn.Linear


def new_head(like: Head, classes: int) -> Head:
    """A new head whose logits are on the scale of those of `like`.

    The logits of a linear ImageNet head are much larger than 16·cos, so a cosine head beside one would never win. A
    new head is therefore of the base head's kind, and the rows of a linear one start with the mean norm of the base's.
    """
    features = like.weight.shape[1]
    if isinstance(like, CosineHead):
        return CosineHead(features, classes)
    head = nn.Linear(features, classes, bias=like.bias is not None)
    with torch.no_grad():
        head.weight.copy_(F.normalize(torch.randn(classes, features), dim=1) * like.weight.norm(dim=1).mean().cpu())
        if like.bias is not None:
            head.bias.fill_(like.bias.mean().item())
    return head


def head_bias(head: Head) -> Tensor | None:
    return head.bias if isinstance(head, nn.Linear) else None


class Correction(nn.Module):
    """What a branch adds to the logits of all earlier branches; nothing at first."""

    def __init__(self, features: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, columns))

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        """The logits z, of which the first columns are corrected, from the branch's features h."""
        return self.added_to(z, to_norm(h))

    def added_to(self, z: Tensor, u: Tensor) -> Tensor:
        """The same from features of length 4."""
        added = u @ self.weight.to(u)
        return z + F.pad(added, (0, z.shape[-1] - added.shape[-1]))


class Pooler(nn.Module):
    """One logit per class from one per column: the maximum, or the mean, of the columns that name the class."""

    columns_of: Tensor
    counted: Tensor

    def __init__(self, space: LabelSpace, kind: str = "max") -> None:
        super().__init__()
        if kind not in POOLERS:
            raise unknown("pooler", kind, POOLERS)
        self.kind = kind
        columns: list[list[int]] = [[] for _ in space.classes]
        for column, class_number in enumerate(space.class_of_column):
            columns[class_number].append(column)
        width = max(len(c) for c in columns)
        # A class with fewer columns than others repeats its first: the maximum stays the same, the mean weighs it 0.
        padded = [c + [c[0]] * (width - len(c)) for c in columns]
        counted = [[1.0] * len(c) + [0.0] * (width - len(c)) for c in columns]
        self.register_buffer("columns_of", torch.tensor(padded), persistent=False)
        self.register_buffer("counted", torch.tensor(counted), persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        """(…, columns) → (…, classes)."""
        if self.columns_of.shape[1] == 1:  # one column for each class, in the order of classes
            return z
        spread = z[..., self.columns_of]
        if self.kind == "max":
            return spread.amax(-1)
        counted = self.counted.to(z.dtype)
        return (spread * counted).sum(-1) / counted.sum(-1)


def delta_inputs(feature_of: Sequence[int]) -> list[list[int]]:
    """For each branch d the feature vectors that its deltas use: those of all other branches.

    `feature_of[d]` is the feature vector that branch d's own head uses. Branches that clone nothing share the base's,
    so two branches may use the same one; it is then listed once.
    """
    return [sorted({f for other, f in enumerate(feature_of) if other != d}) for d in range(len(feature_of))]


class FusedHead(nn.Module):
    """All heads side by side, corrections and deltas between them, the class means, the dial and the pooler."""

    bias: Tensor
    branch_of_column: Tensor

    def __init__(
        self,
        space: LabelSpace,
        heads: Sequence[Head],
        feature_of: Sequence[int],
        pooler: str = "max",
        class_means: ClassMeans | None = None,
        corrections: Sequence[Correction | None] = (),
    ) -> None:
        """`corrections` has an entry for every step, None where there is none; by default no step has one."""
        super().__init__()
        for number, (names, head) in enumerate(zip(space.branches, heads, strict=True)):
            if len(head.weight) != len(names):
                raise BranchoutError(
                    f"The head of {branch_name(number)} has {len(head.weight)} rows for {len(names)} classes"
                )
        self.space = space
        self.heads = nn.ModuleList(heads)
        self.feature_of = tuple(feature_of)
        self.delta_inputs = delta_inputs(feature_of)
        self.pooler = Pooler(space, pooler)
        self.class_means = class_means
        for number in range(len(heads)):  # buffers, so that they move with the module
            self.register_buffer(f"delta_{number}", None, persistent=False)
        self.register_buffer("bias", torch.zeros(len(heads)), persistent=False)
        self.register_buffer("branch_of_column", torch.tensor(space.branch_of_column), persistent=False)
        self.corrections = nn.ModuleDict(
            {str(number): each for number, each in enumerate(corrections, 1) if each is not None}
        )

    @property
    def deltas(self) -> list[Tensor | None]:
        """For each branch d a matrix (Σk_d' over its `delta_inputs` × |Y_d|), or None where none was trained."""
        return [getattr(self, f"delta_{number}") for number in range(len(self.heads))]

    @deltas.setter
    def deltas(self, deltas: Sequence[Tensor | None]) -> None:
        if len(deltas) != len(self.heads):
            raise BranchoutError(f"{len(deltas)} deltas were given for {len(self.heads)} branches")
        for number, delta in enumerate(deltas):
            setattr(self, f"delta_{number}", None if delta is None else delta.to(self.bias.device))

    def set_bias(self, b: float | Sequence[float]) -> None:
        """Set the dial: one number for all new branches, or one for each."""
        steps = len(self.heads) - 1
        values = [b] * steps if isinstance(b, (int, float)) else list(b)
        if len(values) != steps:
            raise BranchoutError(f"{len(values)} biases were given for {steps} steps")
        self.bias.copy_(torch.tensor([0.0, *values], dtype=self.bias.dtype))

    @property
    def shift(self) -> Tensor:
        """What the dial adds to the logit of each column."""
        return self.bias[self.branch_of_column]

    def frozen_columns(self, features: Sequence[Tensor]) -> Tensor:
        """z: every branch's logits side by side (N, columns), corrected by later branches, before deltas and dial."""
        z = self.head_columns(features)
        if self.corrections:
            u = to_norm(torch.stack(list(features))).unbind()  # once, also where two branches share features
            for number, correction in self.corrections.items():
                z = correction.added_to(z, u[self.feature_of[int(number)]])  # type: ignore[operator]
        return z

    def head_columns(self, features: Sequence[Tensor]) -> Tensor:
        """What the heads alone give, without corrections."""
        cosine = [head for head in self.heads if isinstance(head, CosineHead)]
        if len(cosine) < len(self.heads):
            return torch.cat([head(features[f]) for head, f in zip(self.heads, self.feature_of, strict=True)], dim=-1)
        # As each head computes it, with all rows normalised at once: a GPU launches a tenth of the kernels.
        u = to_norm(torch.stack(list(features))).unbind()
        weights = to_norm(torch.cat([head.weight for head in cosine]))
        of_branch = torch.split(weights.T, [len(head.weight) for head in cosine], dim=1)
        return torch.cat([u[f] @ w for f, w in zip(self.feature_of, of_branch, strict=True)], dim=-1)

    def delta_columns(self, features: Sequence[Tensor]) -> Tensor | None:
        """Δz, or None if there are no deltas."""
        if all(delta is None for delta in self.deltas):
            return None
        u = to_norm(torch.stack(list(features))).unbind()
        parts = []
        for d, delta in enumerate(self.deltas):
            width = len(self.space.branches[d])
            if delta is None:
                parts.append(u[0].new_zeros(*u[0].shape[:-1], width))
            else:
                parts.append(torch.cat([u[f] for f in self.delta_inputs[d]], dim=-1) @ delta.to(u[0]))
        return torch.cat(parts, dim=-1)

    def columns(self, features: Sequence[Tensor]) -> Tensor:
        """z̃: logits of every column with deltas and class means, before the dial.

        Of the features of a model with later steps, the first ones are this model's.
        """
        features = features[: 1 + max(self.feature_of)]
        z = self.frozen_columns(features)
        delta = self.delta_columns(features)
        z = z if delta is None else z + delta
        if self.class_means is None:
            return z
        old = len(self.space.branches[0])
        return torch.cat([z[..., :old], self.class_means(z[..., old:], features)], dim=-1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Logits over all classes."""
        z = self.columns(features)
        return self.pooler(z + self.shift.to(z.dtype))  # type: ignore[no-any-return]
