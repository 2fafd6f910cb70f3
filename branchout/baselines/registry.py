"""The baselines by name."""

from __future__ import annotations

from importlib import import_module

from branchout.baselines.task import Baseline

MODULES = (
    *("pretrained", "routing", "featcat", "logitcat", "finetune", "lwf", "icarl", "bic", "wa", "der", "podnet"),
    *("foster", "memo", "rainbow", "joint", "ncm", "ranpac", "fecam", "classifier_alignment", "aper"),
)
"""One file per idea; each lists its `BASELINES`."""


def baselines() -> dict[str, Baseline]:
    """All baselines, in the order of the tables."""
    modules = (import_module(f"branchout.baselines.{name}") for name in MODULES)
    return {baseline.name: baseline for module in modules for baseline in module.BASELINES}
