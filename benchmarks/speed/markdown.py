"""Shared by the parts of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
DEVICES = {"cuda": "GPU", "cpu": "2 cores"}


def link(name: str, text: str) -> str:
    return f"[{text}](../results/speed/{quote(name)}.json)"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.3g}"


def table(*lines: tuple[str, ...]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *body))
