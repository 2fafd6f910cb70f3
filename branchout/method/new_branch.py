"""What stage I trains, and how it starts (paper, section 3.3: Φ_n is a clone of Φ_b, W_n is new).

Symbols: Φ_n → `NewBranch.branch` · W_n → `NewBranch.head` · W_c (ours) → `NewBranch.correction` · D_n → `Labelled`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.data.images import Images
from branchout.labels import Ints, LabelSpace
from branchout.method.features import extract
from branchout.method.recipes import Stage1
from branchout.model.classifier import Classifier
from branchout.model.heads import Correction, CosineHead, Head, Pooler, head_bias, new_head
from branchout.model.staged import Branch, branch_point
from branchout.training.loop import OnProgress, precision, seed_for, silent


@dataclass(frozen=True)
class Labelled:
    """Images and their classes, as numbers of the label space after this step."""

    images: Images
    labels: Ints


class NewBranch(nn.Module):
    """All that stage I trains: the cloned branch, its head, its correction of the frozen logits, and copies of the old
    heads for distillation."""

    classes: Tensor
    old_classes: Tensor

    def __init__(
        self,
        branch: Branch,
        head: Head,
        old_heads: nn.ModuleList,
        space: LabelSpace,
        pooler: str,
        correction: Correction | None = None,
    ) -> None:
        super().__init__()
        self.branch, self.head, self.old_heads, self.correction = branch, head, old_heads, correction
        self.pooler = Pooler(space, pooler)
        own = space.slice_of(len(space.branches) - 1)
        self.register_buffer("classes", torch.from_numpy(space.class_of_column[own]), persistent=False)
        self.register_buffer("old_classes", torch.from_numpy(space.class_of_column[: own.start]), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        with precision(x.device):
            h: Tensor = self.branch(x)
        return h.float()

    def corrected(self, z: Tensor, h: Tensor) -> Tensor:
        """The frozen logits with what this branch adds to them."""
        return z if self.correction is None else self.correction(z, h)

    def column_of(self, y: Tensor) -> Tensor:
        """The columns of the new head that stand for classes y."""
        return (y[:, None] == self.classes).int().argmax(1)

    def copied_logits(self, h: Tensor) -> Tensor:
        """What the copies of the old heads make of the new features: (n, columns)."""
        return torch.cat([head(h) for head in self.old_heads], dim=1)

    def trained_parameters(self) -> list[nn.Parameter]:
        corrections = [] if self.correction is None else [self.correction.weight]
        return [*self.branch.own_parameters(), *self.head.parameters(), *self.old_heads.parameters(), *corrections]


def initial_branch(
    model: Classifier,
    names: Sequence[str],
    new: Labelled,
    where: str,
    *,
    settings: Stage1,
    exemplars: bool = False,
    seed: int,
    device: torch.device,
    on_progress: OnProgress = silent,
) -> NewBranch:
    """Φ_n starts as a clone of Φ_b; a cosine head starts at random, a linear one at the means of its classes.

    `exemplars`: whether stage I replays any. Without them nothing teaches a correction, and a head of one class stays
    where it starts, so that a cosine one, too, starts at the mean.
    """
    torch.manual_seed(seed_for(seed, len(model.steps)))
    branch = Branch.clone(model.backbone, branch_point(model.backbone, where))
    branch.to(device, memory_format=model.backbone.layout(device))  # type: ignore[call-overload]
    head = new_head(model.base_head, len(names)).to(device)
    space = model.space.extend(names)
    if isinstance(head, nn.Linear) or (len(names) == 1 and not exemplars):
        imprint(head, model, new, space, settings.first_rows, device, on_progress)
    old_heads = copied_heads(model) if settings.replay else nn.ModuleList()
    correction = None
    if exemplars and learns_correction(model, branch, settings):
        correction = Correction(model.backbone.features, model.space.columns)
    return NewBranch(branch, head, old_heads, space, model.fused.pooler.kind, correction).to(device)


def learns_correction(model: Classifier, branch: Branch, settings: Stage1) -> bool:
    """Whether a new branch also learns what it adds to the frozen logits, if there are exemplars.

    Beside linear heads it gained nothing: class means compare the classes of all steps there. A correction that is
    larger than the branch would make models of many classes and steps large.
    """
    late = settings.corrections_after is not None and len(model.steps) >= settings.corrections_after
    fits = model.backbone.features * model.space.columns <= branch.parameter_count
    return settings.replay and late and fits and not model.has_linear_head


@torch.no_grad()
def imprint(
    head: Head,
    model: Classifier,
    new: Labelled,
    space: LabelSpace,
    length: float,
    device: torch.device,
    on_progress: OnProgress = silent,
) -> None:
    """Start a head at the means of its classes, with logits on the scale of the earlier heads.

    With a dozen images and a small learning rate, random rows would hardly move. Each row points from the mean of all
    classes to the mean feature of its own and is `length` times as long as the base's rows; its bias gives it, on
    its own images, the mean of the largest earlier logit, so that neither side starts above the other.
    """
    features = extract(model, new.images, device=device, on_progress=on_progress)[0]
    largest = model.fused.frozen_columns(features.unbind(1)).amax(1)
    class_numbers = torch.from_numpy(space.index(space.branches[-1])).to(device)
    member = torch.from_numpy(new.labels).to(device)[:, None] == class_numbers
    averaging = member.float() / member.sum(0).clamp(min=1)
    means = averaging.T @ features[:, 0]
    direction = means - means.mean(0) if len(means) > 1 else means
    head.weight.copy_(F.normalize(direction, dim=1) * head.weight.norm(dim=1, keepdim=True) * length)
    bias = head_bias(head)
    if bias is not None:
        bias.copy_(averaging.T @ largest - (head.weight * means).sum(1))


def copied_heads(model: Classifier) -> nn.ModuleList:
    """Trainable copies of all heads, which will read the new branch's features."""
    copies: list[Head] = []
    for head in model.fused.heads:
        classes, features = head.weight.shape  # type: ignore[misc]
        copy: Head = CosineHead(features, classes)
        if isinstance(head, nn.Linear):
            copy = nn.Linear(features, classes, bias=head.bias is not None)
        copy.load_state_dict(head.state_dict())
        copies.append(copy)
    return nn.ModuleList(copies)
