"""The settings of a gradient descent: epochs, learning rate, batch size, schedule, optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ADDED_LATER = {"added later": True}
"""Metadata of settings that rows and checkpoints written before them do not name. Those had the default, or are marked
as outdated."""


@dataclass(frozen=True)
class Optimisation:
    """Stochastic gradient descent with momentum 0.9, or AdamW, and its schedule."""

    epochs: int
    lr: float = 0.1
    batch: int = 256
    weight_decay: float = 1e-4
    nesterov: bool = False
    schedule: str = "thirds"
    """`thirds`: ÷10 after each third of the epochs; `cosine`: 5% warm-up, then down to 0; `plain-cosine`: without
    warm-up; `constant`; and the others of `loop.MILESTONES`."""
    optimiser: str = field(default="sgd", metadata=ADDED_LATER)
    """`sgd`, or `adamw` for transformers, which also clips gradients at norm 1."""

    def __repr__(self) -> str:
        return f"Optimisation({', '.join(f'{name}={value!r}' for name, value in settings_dict(self).items())})"


def settings_dict(settings: DataclassInstance) -> dict[str, Any]:
    """Settings, including nested ones, as a dict: the form that is saved, compared and hashed.

    A setting that was added later is left out while it has its default: rows, checkpoints and cache keys that were
    written before there was a choice must keep the same bytes.
    """
    values = {each: getattr(settings, each.name) for each in fields(settings)}
    return {
        each.name: settings_dict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for each, value in values.items()
        if not (each.metadata == ADDED_LATER and value == each.default)
    }


def optimisation_in(saved: Mapping[str, Any]) -> Optimisation | None:
    """The optimisation that `settings_dict` wrote into `saved` among other entries; None if there is none."""
    found = {"optimiser": "sgd", **saved}
    names = [each.name for each in fields(Optimisation)]
    return Optimisation(**{name: found[name] for name in names}) if set(names) <= set(found) else None


def scale_to_dataset(optimisation: Optimisation, images: int) -> Optimisation:
    """The same training for few images: a smaller batch, so that an epoch has ten steps, and a learning rate to match.

    From 2,560 images on, a batch of 256 stays as it is.
    """
    size = min(optimisation.batch, max(16, images // 10), images)
    return replace(optimisation, batch=size, lr=optimisation.lr * size / optimisation.batch)
