"""How much stage I computes on which machine (the paper has one setting, for GPUs)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from branchout.data.images import SMALL
from branchout.errors import BranchoutError
from branchout.method.config import ExtendConfig
from branchout.model.classifier import Classifier
from branchout.model.staged import branch_point
from branchout.units import count, duration

VIEWS = {"cuda": 15, "cpu": 4}
"""Cached views in stage I, by device: more take memory and time, fewer cost accuracy."""

CPU_BATCH = 64
"""New images in a batch on a CPU: twice as many take twice the memory, and longer for each of them."""


@dataclass(frozen=True)
class Effort:
    """How much stage I computes; more takes time and memory, less costs accuracy."""

    views: int
    """Augmented views of each new image whose trunk outputs are cached."""
    exemplar_views: int | None = None
    """Views of each exemplar; None for as many as make both pools equally large."""
    exemplar_share: float = 1.0
    """Exemplars in a batch for every new image."""
    epochs: int | None = None
    """None for the recipe's."""
    stops: bool = False
    """Training ends early once the loss on held-out images stops improving."""
    compressed: bool = False
    """Cached feature maps are kept in 8 bits."""
    batch: int | None = None
    """The most new images in a batch, with a learning rate to match; None for the recipe's."""


FULL = Effort(VIEWS["cuda"])
SMALL_INPUTS = Effort(VIEWS["cpu"])
LARGE_INPUTS = Effort(VIEWS["cpu"], exemplar_views=1, exemplar_share=0.5, epochs=15)

HEADS = tuple(Effort(views, max(1, views // 2)) for views in (2, 4, 8))
"""For a new head alone, from little to much."""
BRANCHES = tuple(
    replace(effort, stops=True, compressed=True, batch=CPU_BATCH)
    for effort in (
        replace(LARGE_INPUTS, epochs=10),
        LARGE_INPUTS,
        Effort(6, exemplar_views=1, exemplar_share=0.5, epochs=20),
        Effort(6, exemplar_views=1, exemplar_share=0.5, epochs=30),
        Effort(8, exemplar_views=1, exemplar_share=0.5, epochs=30),
        Effort(10, exemplar_views=1, exemplar_share=0.5, epochs=30),
        Effort(12, exemplar_views=2, exemplar_share=0.5, epochs=30),
        Effort(VIEWS["cuda"], epochs=30),
    )
)
"""For a branch on a CPU, from little to much."""
ON_GPU = (*(replace(effort, compressed=False, batch=None) for effort in BRANCHES[:-1]), FULL)
"""The same on a GPU: its memory holds whole feature maps, and large batches are faster there."""


def effort_for(device: torch.device, size: int) -> Effort:
    """On a GPU all that pays; on a CPU what takes minutes for networks of this input size."""
    if device.type == "cuda":
        return FULL
    return SMALL_INPUTS if size <= SMALL else LARGE_INPUTS


def usual_effort(base: Classifier, branch: str, device: torch.device, *, replay: bool) -> Effort:
    """What is trained where nothing limits it; `replay` is the recipe's."""
    if replay and trains_head_alone(base, branch):
        return HEADS[-1]
    return effort_for(device, base.preprocessing.size)


def trains_head_alone(base: Classifier, branch: str) -> bool:
    """Nothing is cloned, and the head is linear: a recipe with replay then needs no SGD."""
    return branch == "fc" and base.has_linear_head


def check_head_alone(base: Classifier, config: ExtendConfig) -> None:
    """Refuse epochs and views for a head that has none: it is trained to convergence, on the views of a plan."""
    if not (config.replays and trains_head_alone(base, config.where)):
        return
    for name, option in (("epochs", "--epochs"), ("views", "views")):  # the latter is an argument in Python alone
        if getattr(config, name) is not None:
            raise BranchoutError(
                f"With --branch fc beside a linear head only a head is trained, until its loss is minimal, so "
                f"{option} has no effect; leave it out. --minutes limits the time"
            )


@dataclass(frozen=True)
class Plan:
    """What will be trained, and how long it should take."""

    branch: str
    effort: Effort
    engine: str = "torch"
    """What runs the frozen part: see `method.running.engine`."""
    seconds: float | None = None
    """The forecast; None where nothing was measured."""
    more: str = ""
    """A sentence about what more time would train."""
    too_short: str = ""
    """A sentence about a time limit that this plan exceeds."""
    module: bool = False
    """Whether the branch is one module instead of a stage and all later ones."""

    @classmethod
    def of(cls, base: Classifier, branch: str, effort: Effort) -> Plan:
        return cls(branch, effort, module=branch_point(base.backbone, branch).only is not None)

    def lines(self) -> Iterator[str]:
        """The plan in words; nothing where nothing was measured."""
        if self.seconds is not None:
            yield f"plan: train {self.described()}: about {duration(self.seconds)} (frozen part in {self.engine})"
            yield from (line for line in (self.too_short, self.more) if line)

    def described(self) -> str:
        other = f"the module {self.branch}" if self.module else f"the network from {self.branch} on"
        what = {"fc": "a new head", "last": "the last stage"}.get(self.branch, other)
        epochs = f", {count(self.effort.epochs, 'epoch')}" if self.effort.epochs and self.branch != "fc" else ""
        return f"{what} with {count(self.effort.views, 'view')} of each new image{epochs}"
