"""The baselines by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from branchout.baselines.common import Task

MODULES: tuple[str, ...] = (
    "pretrained",
    "routing",
    "featcat",
    "logitcat",
    "finetune",
    "lwf",
    "icarl",
    "bic",
    "wa",
    "der",
    "podnet",
    "rainbow",
    "joint",
    "ncm",
    "ranpac",
    "fecam",
    "slca",
    "aper",
)
"""One file per idea; each lists its `BASELINES`."""

Learn = Callable[[Any, Task], nn.Module]


@dataclass(frozen=True)
class Baseline:
    """A row of a table: how it is called, what it builds on, and where its idea applies."""

    name: str
    label: str
    """As the paper's tables, or the field, write it."""
    learn: Learn
    on: str
    """What `before` is. `features`: our base with one branch for each step so far, learned by the paper's stage I
    (given anew at every step). `network` or `base`: the base model, then the method's own result of the step before."""
    dial: bool = True
    """Its scores are logits of one scale, so the dial may move those of new classes."""
    oracle: bool = False
    """Sees all training images of all classes."""
    anew: bool = False
    """Starts from nothing at every step, so that what it is after the last step can be had without those before."""
    seeded: bool = True
    """Something in it is drawn, or hangs on which exemplars were: every seed gives another result."""
    note: str = ""
    """Where it does not apply, and why."""


def baselines() -> dict[str, Baseline]:
    """All baselines, in the order of the tables."""
    rooms = (import_module(f"branchout.baselines.{name}") for name in MODULES)
    return {method.name: method for room in rooms for method in room.BASELINES}
