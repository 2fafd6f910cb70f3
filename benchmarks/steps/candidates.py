"""Our recipe with one thing changed, each measured as a rung of the ladder: candidates, and what its parts gain.

Settings are changed where the method has them. Candidates that change its losses or its first weights replace functions
of `method.stage1` while their steps are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from branchout.method import stage1
from branchout.method.new_branch import NewBranch, initial_branch
from branchout.method.recipes import BRANCHOUT, Stage1
from branchout.method.running.effort import VIEWS
from branchout.method.stage1 import Batch, cross_entropy
from branchout.model.classifier import Classifier
from branchout.training.losses import softened_kl


@dataclass(frozen=True)
class Candidate:
    """What is changed."""

    epochs: int | None = None
    views: int | None = None
    """Cached views of each new image."""
    exemplar_share: float | None = None
    """Exemplars in a batch for every new image."""
    exemplars: bool = True
    """Whether stage I sees exemplars."""
    distillation: float | None = None
    from_last: bool = False
    """Every branch starts at the one of the step before, instead of at the base."""
    mixed: bool = False
    """Exemplars are mixed in pairs: a rectangle of one's feature map replaces that of another."""
    corrections_after: int | None = BRANCHOUT.stage_one.corrections_after
    """After so many steps, branches also learn what they add to the logits of all earlier ones."""
    averaged: bool = False
    """A branch and its head are the running mean of their weights over the last steps of training."""
    frozen_statistics: bool = False
    """BatchNorm of a branch keeps the means and variances of the base: batches have more new images than tests."""
    by_difficulty: bool = False
    """Classes that are easily confused keep more exemplars, others fewer."""
    fused: bool = False
    """After the last step deltas are trained on the exemplars, as stage II does where classes overlap."""

    def training(self) -> AbstractContextManager[None]:
        """While a step is trained."""
        changed = self.from_last or self.mixed or self.averaged or self.frozen_statistics
        return replaced(self) if changed else nullcontext()


@contextmanager
def replaced(candidate: Candidate) -> Iterator[None]:
    started: list[NewBranch] = []

    def starting(model: Classifier, *args: object, **options: object) -> NewBranch:
        new = initial_branch(model, *args, **options)  # type: ignore[arg-type]
        if candidate.from_last and model.steps:
            new.branch.load_state_dict(model.steps[-1].branch.own_state_dict(), strict=False)
        if candidate.averaged:
            new.means = WeightMeans([new.branch, new.head])
        if candidate.frozen_statistics:
            keep_statistics(new.branch)
        started.append(new)
        return new

    def loss(batch: Batch, new: NewBranch, settings: Stage1) -> Tensor:
        if candidate.averaged:
            means_of(new).update()
        return changed_loss(batch, new, settings, candidate)

    with patch.object(stage1, "initial_branch", starting), patch.object(stage1, "stage1_loss", loss):
        yield
    assert started, "stage I started no branch by stage1.initial_branch"
    if candidate.averaged:
        means_of(started[-1]).use()


def keep_statistics(branch: nn.Module) -> None:
    """Leave its BatchNorms in eval mode, also where the branch is put into training mode."""
    norms = [module for module in branch.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms, "the branch has no BatchNorm"
    for norm in norms:
        norm.eval()
        norm.train = lambda mode=True, norm=norm: norm  # type: ignore[method-assign,misc]


def changed_loss(batch: Batch, new: NewBranch, settings: Stage1, candidate: Candidate) -> Tensor:
    pairs = mixed_in_pairs(batch) if candidate.mixed else [(torch.ones((), device=batch.x.device), batch)]
    h = new.features(pairs[0][1].x)
    z_n, z = new.head(h), pairs[0][1].z
    corrected = new.corrected(z, h)
    terms = [share * cross_entropy(z_n, Batch(each.x, corrected, each.y, each.new), new) for share, each in pairs]
    loss = torch.stack(terms).sum()
    kl = softened_kl(z, new.copied_logits(h), settings.temperature)
    return loss + settings.distillation * settings.temperature**2 * kl


def mixed_in_pairs(batch: Batch) -> list[tuple[Tensor, Batch]]:
    """The batch with mixed exemplars, labelled as either of each pair, and the share of the map that each has.

    Frozen logits are mixed in the same proportion. All numbers are drawn on the device, so that the step can be
    recorded as a CUDA graph.
    """
    n, x = batch.new, batch.x
    height, width = x.shape[2:]
    draws = torch.rand(3, device=x.device)
    side = draws[0].sqrt()  # the rectangle's area is uniform
    rows, columns = (
        ((torch.arange(size, device=x.device) + 0.5) / size - draw * (1 - side)).sub(side / 2).abs() <= side / 2
        for size, draw in ((height, draws[1]), (width, draws[2]))
    )
    inside = rows[:, None] & columns
    share = 1 - inside.float().mean()
    other = torch.randperm(len(x) - n, device=x.device)
    exemplars, frozen = x[n:], batch.z[n:]
    x = torch.cat([x[:n], torch.where(inside, exemplars[other], exemplars)])
    z = torch.cat([batch.z[:n], share * frozen + (1 - share) * frozen[other]])
    swapped = torch.cat([batch.y[:n], batch.y[n:][other]])
    return [(share, Batch(x, z, batch.y, n)), (1 - share, Batch(x, z, swapped, n))]


class WeightMeans(nn.Module):
    """The running means of all weights and BatchNorm statistics of some modules."""

    SHARE = 0.005
    """Of the newest weights: the mean covers about the last 200 steps."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        found = [tensor for module in modules for tensor in module.state_dict().values()]
        self.current = [tensor for tensor in found if tensor.is_floating_point()]
        self.means = [tensor.clone() for tensor in self.current]

    @torch.no_grad()
    def update(self) -> None:
        for mean, tensor in zip(self.means, self.current, strict=True):
            mean.lerp_(tensor, self.SHARE)

    @torch.no_grad()
    def use(self) -> None:
        for mean, tensor in zip(self.means, self.current, strict=True):
            tensor.copy_(mean)


def means_of(new: NewBranch) -> WeightMeans:
    return cast(WeightMeans, new.get_submodule("means"))


CANDIDATES = {
    "from-last": ("every branch starts at the last one instead of the base", Candidate(from_last=True)),
    "corrections": ("the first branch corrects the base's logits, too", Candidate(corrections_after=0)),
    "short": ("12 epochs instead of 30", Candidate(epochs=12)),
    "shorter": ("6 epochs", Candidate(epochs=6)),
    "four-views": ("four views of each new image, as on a CPU", Candidate(views=VIEWS["cpu"])),
    "fewer-exemplars": ("half as many exemplars as new images in a batch", Candidate(exemplar_share=0.5)),
    "distilled": ("12 epochs, three times the weight of distillation", Candidate(epochs=12, distillation=3.0)),
    "mixed": ("12 epochs, exemplars mixed in pairs", Candidate(epochs=12, mixed=True)),
    "short-corrections": (
        "12 epochs, the first branch corrects, too", Candidate(epochs=12, corrections_after=0)
    ),
    "frozen-statistics": ("BatchNorm keeps the base's statistics", Candidate(frozen_statistics=True)),
    "short-frozen-statistics": (
        "12 epochs, BatchNorm keeps the base's statistics", Candidate(epochs=12, frozen_statistics=True)
    ),
    "averaged": ("running means of the weights in stage I", Candidate(averaged=True)),
    "by-difficulty": ("more exemplars of classes that are easily confused", Candidate(by_difficulty=True)),
    "undistilled": ("stage I with exemplars, without distillation", Candidate(distillation=0.0)),
    "no-exemplars": ("stage I without exemplars, with distillation", Candidate(exemplars=False)),
    "neither": ("stage I without both", Candidate(exemplars=False, distillation=0.0)),
    "fused": ("deltas trained on the exemplars after the last step", Candidate(fused=True)),
}  # fmt: skip
