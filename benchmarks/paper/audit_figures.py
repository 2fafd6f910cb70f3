"""The audit of the chart of the first screen: each mark stands at its scenario and at the number of its row."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.paper.audit import LINK, Audit, mean, tables_of
from benchmarks.paper.audit_screen import who

SVG = "{http://www.w3.org/2000/svg}"
LEGEND = {
    "Branchout": "#0072b2",
    "the paper's recipe": "#00795a",
    "best other method": "#b34a00",
    "joint training with the dial (sees all images)": "#5f6368",
}
HOLLOW = "#ffffff"
BASELINE = 3.0
"""How far the base line of a label is below its middle."""


def check(audit: Audit) -> None:
    page = audit.docs / "figures" / "overview.svg"
    groups = list(ElementTree.parse(page).iter(f"{SVG}g"))
    across, names = ticks(groups, "xtick_", "x"), ticks(groups, "ytick_", "y")
    (low, low_value), *_, (high, high_value) = sorted((x, float(told)) for told, x in across.items())
    found: dict[str, list[tuple[str, float]]] = {}
    for colour, x, y in marks(groups):
        name = min(names, key=lambda name: abs(names[name] - BASELINE - y))
        found.setdefault(colour, []).append((name, low_value + (x - low) / (high - low) * (high_value - low_value)))
    audit.same(f"{page.name}, legend", str(legend(groups)), str(LEGEND))
    ((_, _, lines),) = tables_of(audit.docs / "results.md")
    shown = {(name := LINK.findall(line[0])[0][0]): who(audit, name) for line in lines}
    audit.same(f"{page.name}, scenarios", str(sorted(names, key=names.__getitem__)), str(list(shown)))
    hollow = []
    for place, colour in enumerate(LEGEND.values()):
        paths = {name: path for name, sides in shown.items() if (path := sides[place])}
        expected = [(name, mean(audit.rows[path], "balanced") or 0.0) for name, path in paths.items()]
        hollow += [each for each, path in zip(expected, paths.values(), strict=True) if audit.marks(path)]
        compare(audit, f"{page.name}, {colour}", found.get(colour, []), expected)
    compare(audit, f"{page.name}, hollow", found.get(HOLLOW, []), hollow)


def compare(audit: Audit, where: str, found: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    near = [name for name, _ in found] == [name for name, _ in expected] and all(
        abs(a - b) < 0.01 for (_, a), (_, b) in zip(found, expected, strict=True)
    )
    audit.same(where, str(expected if near else found), str(expected))


def ticks(groups: list[ElementTree.Element], kind: str, axis: str) -> dict[str, float]:
    """The labels of an axis, and where they stand on it: at their tick, or else a little below their line."""
    found = {}
    for tick in (group for group in groups if group.get("id", "").startswith(kind)):
        text, mark = next(tick.iter(f"{SVG}text")), next(tick.iter(f"{SVG}use"), None)
        found[text.text or ""] = float((text if mark is None else mark).get(axis, ""))
    return found


def marks(groups: list[ElementTree.Element]) -> list[tuple[str, float, float]]:
    """Colour and place of each mark that is drawn in the chart, not in the legend."""
    inside = [mark for group in groups if group.get("clip-path") for mark in group.findall(f"{SVG}use")]
    return [(_colour(mark), float(mark.get("x", "")), float(mark.get("y", ""))) for mark in inside]


def legend(groups: list[ElementTree.Element]) -> dict[str, str]:
    (box,) = (group for group in groups if group.get("id") == "legend_1")
    texts = [text.text or "" for text in box.iter(f"{SVG}text")]
    return dict(zip(texts, map(_colour, box.iter(f"{SVG}use")), strict=True))


def _colour(mark: ElementTree.Element) -> str:
    return mark.get("style", "").removeprefix("fill: ")
