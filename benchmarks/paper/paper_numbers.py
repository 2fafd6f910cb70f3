"""The paper's own numbers, and what it calls the rows that we measure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from branchout.bench.methods import methods

BEST = {"all": "best-Acc_all", "balanced": "best-balanced", "avg": "best-Acc_avg"}
VARIANTS = {"": "score fusion", "-fc": "score fusion fc-only"}
DEPTHS = {"-layer3": "layer3,4", "": "layer4", "-conv2": "layer4 (conv2 only)", "-fc": "fc-only"}


@cache
def paper() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
    return numbers


def _entry(table: str, arch: str) -> Mapping[str, Any] | None:
    for name in (f"{table}-{arch}", table):
        entry: Mapping[str, Any] | None = paper().get(name)
        if entry is not None and entry["backbone"] == arch:
            return entry
    return None


def paper_rows(table: str, arch: str) -> Mapping[str, Mapping[str, float]]:
    """The paper's rows of a table for one network, empty where it has none."""
    entry = _entry(table, arch)
    rows: Mapping[str, Mapping[str, float]] = entry["rows"] if entry else {}
    return rows


def paper_number(table: str, arch: str) -> str:
    """Which of the paper's tables it is: 1 to 9, 10a, …; empty where it has none."""
    entry = _entry(table, arch)
    found = re.match(r"Table (\d+[ab]?)\b", entry["what"]) if entry else None
    return found[1] if found else ""


def misprints() -> Iterator[tuple[str, str]]:
    """Where the paper's numbers were corrected, and how."""
    for key, told in paper()["_errata"].items():
        name, *rest = key.split(" / ")
        entry = paper()[name]
        yield ", ".join([entry["what"].split(":")[0], network(entry["backbone"]), *rest]), told


def paper_label(table: str, method: str, point: str) -> str | None:
    """How the paper calls a row of ours; None if it has no such row."""
    known = methods()[method]
    if known.baseline is not None:
        return known.label if point == "plain" else None
    if known.recipe != "reference" or point not in BEST:
        return None
    middle = method.removeprefix("score-fusion").removesuffix("-reference")
    if table == "branch-depth":
        return f"{DEPTHS[middle]}: score fusion {BEST[point]}" if middle in DEPTHS else None
    return f"{VARIANTS[middle]} {BEST[point]}" if middle in VARIANTS else None


def network(arch: str) -> str:
    return {"vit_tiny": "ViT-Tiny"}.get(arch, arch.replace("resnet", "ResNet"))
