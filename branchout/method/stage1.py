"""Stage I: train a new branch beside the frozen network (paper, section 3.3, "Feature augmentation").

The paper trains the clone Φ_n and its head W_n on new images alone. With `replay` (our default) exemplars are added,
the loss is over frozen and new logits together, and copies of the old heads on the new features are distilled.

Symbols: h(x; Φ_s) → `batch.x` · Φ_n → `NewBranch.branch` · W_n → `NewBranch.head` · h_n → `h` · z_n = W_nᵀh_n → `z_n`
· frozen logits z_b, z_n1, … → `batch.z` · y → `batch.y` · D_n → `new` · E → `exemplars`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.data.augment import Augmentation
from branchout.data.images import Images, on_device, shuffled
from branchout.labels import LabelSpace
from branchout.method.features import extract
from branchout.method.recipes import Stage1
from branchout.method.trunk_cache import Frozen, TrunkOutputs
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import CosineHead, Head, Pooler, new_head
from branchout.model.staged import Branch, branch_point
from branchout.training.loop import Report, fit, precision, seed_for, silent
from branchout.training.optimisation import scale_to_dataset

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """Images and their classes, as numbers of the label space after this step."""

    images: Images
    labels: Ints


@dataclass(frozen=True)
class Batch:
    """What the frozen part makes of some new images, followed by exemplars where they are replayed."""

    x: Tensor
    """What enters the branch."""
    z: Tensor | None
    """The logits of all earlier branches (n, columns); None where the recipe does not use them."""
    y: Tensor
    new: int
    """How many of the images are new; the others are exemplars."""


class NewBranch(nn.Module):
    """All that stage I trains: the cloned branch, its head, and copies of the old heads for distillation."""

    classes: Tensor
    old_classes: Tensor

    def __init__(self, branch: Branch, head: Head, memory: nn.Module, space: LabelSpace, pooler: str) -> None:
        super().__init__()
        self.branch, self.head, self.memory = branch, head, memory
        self.pooler = Pooler(space, pooler)
        own = space.slice_of(len(space.branches) - 1)
        self.register_buffer("classes", torch.from_numpy(space.class_of_column[own]), persistent=False)
        self.register_buffer("old_classes", torch.from_numpy(space.class_of_column[: own.start]), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        with precision(x.device):
            h: Tensor = self.branch(x)
        return h.float()

    def column_of(self, y: Tensor) -> Tensor:
        """The columns of the new head that stand for classes y."""
        return (y[:, None] == self.classes).int().argmax(1)

    def trained_parameters(self) -> list[nn.Parameter]:
        return [*self.branch.own_parameters(), *self.head.parameters(), *self.memory.parameters()]


def stage1_loss(batch: Batch, new: NewBranch, settings: Stage1) -> Tensor:
    """L = CE(new) in the paper; with replay L = CE(new) + CE(exemplars) + λ·T²·KL(frozen ‖ copy)."""
    h = new.features(batch.x)
    z_n = new.head(h)
    if batch.z is None:
        return cross_entropy_alone(z_n, batch, new)
    if batch.new < len(batch.y):
        loss = cross_entropy_new(z_n, batch, new) + cross_entropy_exemplars(z_n, batch, new)
    else:
        loss = cross_entropy_alone(z_n, batch, new)
    return loss + settings.distillation * settings.temperature**2 * distillation(h, batch, new, settings.temperature)


def cross_entropy_alone(z_n: Tensor, batch: Batch, new: NewBranch) -> Tensor:
    """Over the new classes alone: without old images, frozen logits would teach the new head to exceed them always."""
    return F.cross_entropy(z_n, new.column_of(batch.y))


def cross_entropy_new(z_n: Tensor, batch: Batch, new: NewBranch) -> Tensor:
    """New images, over frozen and new logits.

    The old column of an image's own class does not compete: pooled with an old logit that is larger from the start,
    the new one would never get a gradient.
    """
    assert batch.z is not None
    y = batch.y[: batch.new]
    rivals = batch.z[: batch.new].masked_fill(new.old_classes == y[:, None], -torch.inf)
    target = new.column_of(y) + batch.z.shape[1]
    return F.cross_entropy(torch.cat([rivals, z_n[: batch.new]], dim=1), target)


def cross_entropy_exemplars(z_n: Tensor, batch: Batch, new: NewBranch) -> Tensor:
    """Exemplars, over the pooled logits of all classes."""
    assert batch.z is not None
    pooled = new.pooler(torch.cat([batch.z, z_n], dim=1)[batch.new :])
    return F.cross_entropy(pooled, batch.y[batch.new :])


def distillation(h: Tensor, batch: Batch, new: NewBranch, temperature: float) -> Tensor:
    """KL from the frozen logits to those of the copied heads on the new features, on all images."""
    assert batch.z is not None
    copied = torch.cat([head(h) for head in new.memory.children()], dim=1)
    student = F.log_softmax(copied / temperature, dim=1)
    teacher = F.log_softmax(batch.z / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def train_branch(
    model: Classifier,
    names: Sequence[str],
    new: Labelled,
    settings: Stage1,
    *,
    exemplars: Labelled | None = None,
    where: str = "last",
    seed: int = 0,
    views: int = 0,
    augmentation: Augmentation | None = None,
    cache_limit: int | None = None,
    device: torch.device,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[Step, list[float]]:
    """Train a branch and a head for the classes `names`; returns them with the mean loss of every epoch.

    `views` > 0 caches the trunk's outputs for that many augmented views of each new image; 0 runs the trunk live.
    """
    start = branch_point(model.backbone, where).start
    trained = initial_branch(model, names, new, where, replay=settings.replay, seed=seed, device=device)
    sources = [new, exemplars] if settings.replay and exemplars is not None else [new]
    frozen = Frozen(model, start, logits=settings.replay, augmentation=augmentation, device=device)
    images = [source.images for source in sources]
    trunk = TrunkOutputs(frozen, images, views, limit=cache_limit, seed=seed, report=report)
    optimisation = scale_to_dataset(settings.optimisation, len(new.labels))
    labels = [torch.from_numpy(source.labels).to(device) for source in sources]

    def epoch_batches(epoch: int) -> Iterator[Batch]:
        orders = epoch_orders([len(source.labels) for source in sources], optimisation.batch, seed, epoch)
        chosen = zip(*(on_device(order, device) for order in orders), strict=True)
        for outputs, indices in zip(trunk.batches(epoch, orders), chosen, strict=True):
            y = torch.cat([of[index] for of, index in zip(labels, indices, strict=True)])
            yield Batch(outputs[0], outputs[1] if settings.replay else None, y, optimisation.batch)

    losses = fit(
        trained.train(),
        trained.trained_parameters(),
        epoch_batches,
        max(len(new.labels) // optimisation.batch, 1),
        lambda batch: stage1_loss(batch, trained, settings),
        optimisation,
        device=device,
        work="Training the new branch",
        checkpoint=checkpoint,
        report=report,
    )
    return Step(tuple(names), where, start, trained.branch, trained.head), losses


def initial_branch(
    model: Classifier,
    names: Sequence[str],
    new: Labelled,
    where: str,
    *,
    replay: bool,
    seed: int,
    device: torch.device,
) -> NewBranch:
    """Φ_n starts as a clone of Φ_b; a cosine head starts at random, a linear one at the means of its classes."""
    torch.manual_seed(seed_for(seed, len(model.steps)))
    branch = Branch.clone(model.backbone, branch_point(model.backbone, where))
    branch.to(device, memory_format=model.backbone.layout(device))  # type: ignore[call-overload]
    head = new_head(model.base_head, len(names)).to(device)
    space = model.space.extend(names)
    if isinstance(head, nn.Linear):
        imprint(head, model, new, space, device)
    memory = copied_heads(model) if replay else nn.Identity()
    return NewBranch(branch, head, memory, space, model.fused.pooler.kind).to(device)


@torch.no_grad()
def imprint(head: nn.Linear, model: Classifier, new: Labelled, space: LabelSpace, device: torch.device) -> None:
    """Start a linear head at the means of its classes, with logits on the scale of the earlier heads.

    With a dozen images and a small learning rate, random rows would hardly move. Each row points from the mean of all
    classes to the mean feature of its own and has the length of the base's rows; its bias gives it, on its own images,
    the mean of the largest earlier logit, so that neither side starts above the other.
    """
    features = extract(model, new.images, device=device)[0]
    largest = model.fused.frozen_columns(features.unbind(1)).amax(1)
    names = torch.from_numpy(space.index(space.branches[-1])).to(device)
    member = torch.from_numpy(new.labels).to(device)[:, None] == names
    share = member.float() / member.sum(0).clamp(min=1)
    means = share.T @ features[:, 0]
    direction = means - means.mean(0) if len(means) > 1 else means
    head.weight.copy_(F.normalize(direction, dim=1) * head.weight.norm(dim=1, keepdim=True))
    if head.bias is not None:
        head.bias.copy_(share.T @ largest - (head.weight * means).sum(1))


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


def epoch_orders(sizes: Sequence[int], batch: int, seed: int, epoch: int) -> list[list[Ints]]:
    """Which images each batch of an epoch has: new ones, and as many exemplars where there are any."""
    orders = [shuffled(sizes[0], batch, seed_for(seed, epoch, 0), drop_last=True)]
    orders += [draws(size, batch, len(orders[0]), seed_for(seed, epoch, 1)) for size in sizes[1:]]
    return orders


def draws(count: int, size: int, batches: int, seed: int) -> list[Ints]:
    """`batches` batches of `size` positions, each position as often as any other, give or take one."""
    rng = np.random.default_rng(seed)
    rounds = -(-size * batches // count)
    order = np.concatenate([rng.permutation(count) for _ in range(rounds)])
    return [order[n * size : (n + 1) * size] for n in range(batches)]
