"""Small pieces of a page: text made harmless, numbers as people read them, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

MINUS = "\N{MINUS SIGN}"
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of characters may not stand in a page at all, escaped or not."""


def text(value: object) -> str:
    """Any text as it may stand in a page, within tags or within an attribute."""
    return escape(FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def named(value: object) -> str:
    """A name that somebody else gave: isolated, so that one written from right to left disturbs no neighbour."""
    return f"<bdi>{text(value)}</bdi>"


def percent(share: float | None, absent: str = "–") -> str:
    return absent if share is None else f"{100 * share:.1f}"


def change(before: float | None, after: float | None) -> str:
    """Points gained or lost, with a sign."""
    if before is None or after is None:
        return ""
    points = f"{abs(100 * (after - before)):.1f}"
    return "±0" if points == "0.0" else f"{'+' if after > before else MINUS}{points}"


def count(number: int, thing: str, several: str = "") -> str:
    return f"{number:,} {thing if number == 1 else several or thing + 's'}"


def parameters(number: float) -> str:
    for unit, step in ((" billion", 1e9), (" million", 1e6), (" thousand", 1e3)):
        if number >= step:
            return f"{number / step:.1f}{unit}"
    return f"{number:.0f}"


def size(number: float) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= step:
            return f"{number / step:.1f} {unit}"
    return f"{number:.0f} bytes"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def command(line: str) -> str:
    return f'<code class="command">{text(line)}</code>'


def note(sentence: str, kind: str = "") -> str:
    """A remark; the sentence is markup already."""
    return f'<p class="{f"note {kind}".strip()}">{sentence}</p>'


def table(
    headings: Sequence[tuple[str, str]],
    rows: Iterable[str],
    *,
    caption: str,
    name: str = "",
    sortable: bool = False,
    sorted_by: int | None = None,
) -> str:
    """A table of ready rows. A heading has a kind: `name` for words, `number` for numbers, `bar` for a drawing."""
    cells = []
    for place, (heading, kind) in enumerate(headings):
        inner = f'<button type="button">{text(heading)}</button>' if sortable and kind != "bar" else text(heading)
        order = ' aria-sort="ascending"' if place == sorted_by else ""
        cells.append(f'<th scope="col" class="{kind}"{order}>{inner}</th>')
    marks = (f' id="{name}"' if name else "") + (' class="sortable"' if sortable else "")
    return (
        f'<div class="scroll"><table{marks}><caption>{caption}</caption>'
        f"<thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(cells: Sequence[tuple[str, str]], attributes: str = "") -> str:
    """One row; the first cell names it."""
    (kind, first), *others = cells
    rest = "".join(f'<td class="{kind}">{value}</td>' for kind, value in others)
    return f'<tr{attributes}><th scope="row" class="{kind}">{first}</th>{rest}</tr>'
