"""The parts of a page in Markdown: cells that lead to their files, tables, footnotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from benchmarks.paper.rows import Row
from branchout.bench.rows import number

TEXTS = Path(__file__).parent / "texts"
MARKS = {
    "†": "To be measured again: [why](definitions.md#marks).",
    "‡": "Measured with [another training of the base](definitions.md#marks).",
}


def signed(value: float) -> str:
    text = number(round(value, 6))
    return text.replace("-", "−") if text.strip("-0.") else "0.0"


def plain(words: str) -> str:
    """Text without meaning in Markdown."""
    return re.sub(r"([\\|<>\[\]*`])", r"\\\1", words)


def anchor(heading: str) -> str:
    """How a link names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Writer:
    """Cells with links, as seen from one page."""

    results: str
    """The way from the page to the results folder."""

    def link(self, words: str, row: Row) -> str:
        return f"[{words}]({self.results}/{quote(row.path.as_posix())})"

    def value(self, row: Row, metric: str) -> str:
        found = row.value(metric)
        spread = row.spread(metric) if metric != "parameters" else None
        return number(found) + (f" ± {number(round(spread, 6))}" if found is not None and spread is not None else "")

    def linked(self, row: Row | None, metric: str) -> str:
        """A number that leads to its own file, with the marks of its row."""
        if row is None or row.value(metric) is None:
            return "–"
        return self.link(self.value(row, metric), row) + row.marks

    def text(self, name: str) -> str:
        """A hand-written part; `results:` stands for the way to the results."""
        return (TEXTS / f"{name}.md").read_text(encoding="utf-8").strip().replace("](results:", f"]({self.results}/")


LEFT = ("more", "verdict", "best other method (of how many)")


def table(heading: Sequence[str], body: Iterable[Sequence[str]], numbers: int = 1) -> str:
    """A Markdown table; columns from `numbers` on are aligned to the right."""
    rule = ["---" if place < numbers or name in LEFT else "---:" for place, name in enumerate(heading)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *body))


def footnotes(page: str) -> str:
    """The page with what its marks mean."""
    used = [f"{mark} {told}" for mark, told in MARKS.items() if f" {mark}" in page]
    return page.rstrip() + ("\n\n" + " ".join(used) if used else "") + "\n"
