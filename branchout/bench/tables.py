"""The paper's tables as data: `tables.json` says who takes part in each, and how large it is on which dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from branchout.baselines.published_training import SCHEDULE as PUBLISHED
from branchout.bench.base_model import open_base
from branchout.bench.plan import Plan
from branchout.data.augment import PADDED
from branchout.data.datasets import Dataset
from branchout.data.scenarios import CLUSTERED
from branchout.errors import BranchoutError, unknown
from branchout.model.architectures import check, is_transformer
from branchout.training.pretrain import FAST, TRANSFORMER, only_fast, schedule_for
from branchout.training.pretrain import PAPER as PAPER_PRETRAINING

SCHEDULES = ("fast", "paper", "published")
FITTED = "fitted"
"""The scale of datasets that have no sizes of their own."""
BY_BASE = "base-classes"
"""Experiments that differ in the number of base classes alone."""


@dataclass(frozen=True)
class Table:
    """One of the paper's tables."""

    name: str
    title: str
    experiment: str
    """The experiment whose rows it shows; tables can share one."""
    archs: tuple[str, ...]
    methods: tuple[str, ...]
    methods_by_arch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The methods for networks of which the paper has only some rows, or none."""
    archs_by_dataset: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further networks that are not in the paper, by dataset."""

    def methods_for(self, arch: str) -> tuple[str, ...]:
        """The methods for one network."""
        return self.methods_by_arch.get(arch, self.methods)


@cache
def _read() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((files("branchout.bench") / "tables.json").read_text(encoding="utf-8"))
    return read


@cache
def tables() -> dict[str, Table]:
    return {
        name: Table(
            name,
            entry["title"],
            entry.get("rows_in", name),
            tuple(entry["archs"]),
            tuple(entry["methods"]),
            {arch: tuple(names) for arch, names in entry.get("methods_for", {}).items()},
            {dataset: tuple(archs) for dataset, archs in entry.get("archs_beside", {}).items()},
        )
        for name, entry in _read()["tables"].items()
    }


@cache
def figures() -> dict[str, Table]:
    """The paper's figures; one without `rows_in` spans experiments that differ in the number of base classes."""
    return {
        name: Table(name, entry["title"], entry.get("rows_in", BY_BASE), ("resnet10",), tuple(entry["methods"]))
        for name, entry in _read()["figures"].items()
    }


def table_named(name: str) -> Table:
    known = tables() | figures()
    if name not in known:
        raise unknown("table", name, known)
    return known[name]


def networks_of(table: Table, dataset: str, scale: str | None = None, schedule: str | None = None) -> tuple[str, ...]:
    """The networks a table is run with on a dataset.

    Further networks come last, and only at the dataset's own scale; transformers only with their own schedule.
    """
    only = _read()["archs_on"].get(dataset, table.archs)
    beside = table.archs_by_dataset.get(dataset, ()) if scale in (None, dataset) else ()
    found = (*(arch for arch in table.archs if arch in only), *beside)
    return found if schedule in (None, "fast") else tuple(arch for arch in found if not is_transformer(arch))


def experiments_of(table: Table, dataset: Dataset, scale: str | None = None, **changes: Any) -> dict[str, Plan]:
    """The experiments whose rows a table or figure shows, by name; `changes` are those of `plan_for`."""
    if table.experiment != BY_BASE:
        return {table.experiment: plan_for(table.experiment, dataset, scale, **changes)}
    whole = plan_for("disjoint-40", dataset, scale, **changes)
    found = {}
    for count in _counts(dataset, scale or scale_of(dataset)):
        plan = replace(whole, kept=count if count != whole.base else None)
        resnet = not is_transformer(plan.arch)
        if resnet and dataset.kind == "glyph" and not changes.get("schedule") and not changes.get("epochs"):
            plan = replace(plan, pretraining=replace(plan.pretraining, epochs=glyph_epochs(count)))
        found[f"{BY_BASE}-{count}"] = plan
    return found


def sizes_of(experiment: str, dataset: Dataset, scale: str) -> dict[str, Any]:
    """How many classes an experiment has at a scale; `fitted` scales Tiny-ImageNet's numbers to the dataset's."""
    sizes = _read()["sizes"]
    if scale != FITTED:
        return dict(sizes[scale][experiment])
    known = len(dataset.train.classes)
    found = dict(sizes["tiny-imagenet-200"][experiment])
    for name in {"novel", "overlap"} & set(found):
        found[name] = max(found[name] * known // 200, 1)
    if "overlap" in found:  # at least one new class beside the overlapping ones
        found["novel"] = max(found["novel"], found["overlap"] + 1)
    if "steps" in found:
        found["steps"] = min(found["steps"], max(known // (2 * found["novel"]), 1))
    if found["base"] is not None:
        found["base"] = max(known - found.get("steps", 1) * found["novel"], 1)
    return found


def _counts(dataset: Dataset, scale: str) -> list[int]:
    """The numbers of base classes that the first two figures compare."""
    if scale != FITTED:
        return list(_read()["base_classes"][scale])
    known = len(dataset.train.classes)
    base = sizes_of("disjoint-40", dataset, scale)["base"]
    fewer = {max(count * known // 200, 2) for count in _read()["base_classes"]["tiny-imagenet-200"][:-1]}
    return [*sorted(count for count in fewer if count < base), base]


def base_class_counts(dataset: str) -> tuple[int, ...]:
    """The same by the name of a dataset; empty if it has no sizes of its own."""
    return tuple(_read()["base_classes"].get(dataset, ()))


def scale_of(dataset: Dataset) -> str:
    """The default scale: the dataset's own, the paper's for ImageNet and datasets as large, or `fitted`."""
    if dataset.name in _read()["sizes"]:
        return dataset.name
    return "paper" if dataset.name == "imagenet-1k" or len(dataset.train.classes) >= 1000 else FITTED


def plan_for(
    experiment: str,
    dataset: Dataset,
    scale: str | None = None,
    *,
    schedule: str | None = None,
    epochs: int | None = None,
    branch_epochs: int | None = None,
    **changes: Any,
) -> Plan:
    """The plan of a table's experiment on a dataset, at a scale.

    It starts from the package's base model where `tables.json` says so and network, schedule and split are that
    model's; otherwise a base is trained.
    """
    scale = scale or scale_of(dataset)
    known = (*_read()["sizes"], FITTED)
    if scale not in known:
        raise unknown("scale", scale, known)
    numbers = sizes_of(experiment, dataset, scale)
    model = numbers.pop("model", None)
    entry = _read()["tables"][experiment]
    plan = Plan(entry["scenario"], numbers.pop("base"), numbers.pop("novel"), **numbers)
    plan = replace(plan, **entry.get("for_arch", {}).get(changes.get("arch"), {}))
    plan = fitted_to(plan, dataset, full_size=scale == "paper" and dataset.kind == "photo", **changes)
    shorter = _read()["base_epochs"].get(scale, {}).get(plan.arch)
    if shorter:  # enough for a large network on small images
        plan = replace(plan, pretraining=replace(plan.pretraining, epochs=shorter))
        schedule = None if schedule == "fast" else schedule
    plan = scheduled(plan, schedule, epochs, branch_epochs)
    given = open_base(model) if model else None
    return given.start(plan) if given and given.stands_for(plan, dataset) else plan


def fitted_to(plan: Plan, dataset: Dataset, *, full_size: bool = False, **changes: Any) -> Plan:
    """A plan with the input size, width and schedule of a dataset and a network, and with the given changes."""
    transformer = is_transformer(changes.get("arch") or plan.arch)
    if full_size:
        plan = replace(plan, size=224, pretraining=PAPER_PRETRAINING)
    elif dataset.kind == "glyph":
        plan = replace(plan, size=32, width=16, pretraining=replace(FAST, epochs=glyph_epochs(plan.base)))
    else:
        shape = dataset.train.pixels.shape
        plan = replace(plan, size=min(shape[:2]) if shape else 64)
    if transformer:
        plan = replace(plan, width=None, pretraining=TRANSFORMER)
    plan = replace(plan, **{key: value for key, value in changes.items() if value is not None})
    check(plan.arch, plan.size, plan.width)
    if transformer and plan.scenario in CLUSTERED:
        raise BranchoutError(
            f"{plan.scenario} is clustered with a ResNet10 that is trained with the table's schedule, and {plan.arch} "
            "has another one; use a ResNet, or a scenario without clustering"
        )
    return plan


def glyph_epochs(classes: int | None) -> int:
    """Epochs of a base model of characters: 12, and more where classes are few, so that it takes enough steps."""
    return 12 if classes is None else min(max(12, math.ceil(12 * 400 / classes)), 60)


def scheduled(plan: Plan, schedule: str | None, epochs: int | None, branch_epochs: int | None = None) -> Plan:
    """A plan with another schedule by name, or with other numbers of epochs; a transformer has one schedule only.

    `epochs` are those of the base and of whole networks, `branch_epochs` those of stages I and II. The schedule of a
    saved base is not changed.
    """
    if schedule is not None and schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    before = plan
    if schedule is not None:
        only_fast(plan.arch, schedule)
    if schedule == "published":
        plan = replace(
            plan, pretraining=PUBLISHED, network=PUBLISHED, augmentation=PADDED, memory="herding", faithful=True
        )
        if plan.arch == "resnet32" and plan.model is None:  # as in the literature
            plan = replace(plan, last_relu=False)
    elif schedule is not None:
        plan = replace(plan, pretraining=schedule_for(plan.arch, schedule))
    if epochs is not None:
        plan = replace(
            plan,
            pretraining=replace(plan.pretraining, epochs=epochs),
            network=replace(plan.network, epochs=epochs),
        )
    if branch_epochs is not None:
        plan = replace(plan, epochs=branch_epochs, fusion_epochs=branch_epochs)
    return plan if before.model is None else replace(plan, pretraining=before.pretraining)
