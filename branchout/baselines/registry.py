"""The baselines by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from branchout.baselines.task import Task

MODULES = (
    *("pretrained", "routing", "featcat", "logitcat", "finetune", "lwf", "icarl", "bic", "wa", "der", "podnet"),
    *("foster", "memo", "rainbow", "joint", "ncm", "ranpac", "fecam", "classifier_alignment", "aper"),
)
"""One file per idea; each lists its `BASELINES`."""

Learn = Callable[[Any, Task], nn.Module]


@dataclass(frozen=True)
class Published:
    """A method as its authors train it."""

    first: Callable[[Task], nn.Module]
    """Trains its base from scratch: the task of step 0 has the base's images as new ones, and no exemplars."""
    learn: Learn


@dataclass(frozen=True)
class Baseline:
    """A method of the tables: its names, what it builds on and where it applies."""

    name: str
    label: str
    """Its name in the paper's tables, or in the literature."""
    learn: Learn
    on: str
    """What `before` is. `features`: our base with one branch for each step so far, learned by the paper's stage I
    (given anew at every step). `network` or `base`: the base model, then the method's own result of the step before."""
    dial: bool = True
    """Its scores are logits of one scale, so the dial may move those of new classes."""
    oracle: bool = False
    """Sees all training images of all classes."""
    anew: bool = False
    """Starts from scratch at every step, so that only the last step needs to be run."""
    seeded: bool = True
    """Its result depends on the exemplar seed."""
    note: str = ""
    """Where it does not apply, and why."""
    published: Published | None = None
    """How it is trained with `--faithful`; None: as always, on the shared base."""


def on_base(name: str, label: str, learn: Callable[..., nn.Module], note: str = "") -> tuple[Baseline, Baseline]:
    """A method on the frozen base that knows its classes by exemplars, and its variant that sees all their images."""
    everything = partial(learn, everything=True)
    return (
        Baseline(name, f"{label}, exemplars", learn, on="base", note=note),
        Baseline(f"{name}-all", f"{label}, all base images", everything, on="base", oracle=True, note=note),
    )


def baselines() -> dict[str, Baseline]:
    """All baselines, in the order of the tables."""
    modules = (import_module(f"branchout.baselines.{name}") for name in MODULES)
    return {baseline.name: baseline for module in modules for baseline in module.BASELINES}
