"""The paper's three figures, drawn from measured rows: as wide as a paper's column, with labels beside their curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from benchmarks.paper.lines import Row
from benchmarks.paper.measurements import alone
from benchmarks.paper.report import read
from branchout.bench.tables import figures
from branchout.files import atomic_write

INK, SOFT, RULE, GROUND = "#1a1a1a", "#5f6368", "#d9d9d9", "#ffffff"
BLUE, RED, GREEN, PALE = "#0072b2", "#b34a00", "#00795a", "#56a0cf"
"""Told apart by people who see colours differently; marks and labels say the same. `page.py` knows them too."""
SIZE = (3.5, 2.8)
STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 7.5,
    "axes.labelsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.facecolor": GROUND,
    "figure.facecolor": GROUND,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "svg.hashsalt": "branchout",  # the same rows give the same file
    "svg.fonttype": "none",
}
DEPTHS = ("fc", "layer4", "layer3", "layer2", "layer1", "stem")
BY_COUNT = ((PALE, "o"), (BLUE, "s"), (GREEN, "^"), (INK, "D"), (RED, "v"))
"""From few base classes to many."""
AROUND = ("right", "left", "above", "below", "above right", "below right", "above left", "below left")
Rows = Mapping[Path, Row]


@dataclass(frozen=True)
class Label:
    """Words for a place in the plot, in the colour of what they name."""

    words: str
    spots: Sequence[tuple[float, float]]
    """Where it may be named: one point, or several along a curve."""
    colour: str
    sides: Sequence[str] = AROUND
    """Where the words may stand, the best first."""


def draw(out: Path, dataset: str, folder: Path, kind: str = "svg") -> list[Path]:
    """Draw every figure that has rows; returns the files."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = read(out)
    painters: dict[str, Callable[[Any, Rows, str], bool]] = {
        "fig-base-classes": base_classes,
        "fig-finetune-depth": finetune_depth,
        "fig-design-space": design_space,
    }
    drawn = []
    for name in figures():
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
            if painters[name](axes, rows, dataset):
                path = folder / f"{name}.{kind}"
                with atomic_write(path) as partial:
                    figure.savefig(partial, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
                drawn.append(path)
            pyplot.close(figure)
    return drawn


def base_classes(axes: Any, rows: Rows, dataset: str) -> bool:
    """With and without fine-tuning, against the number of base classes."""
    found = alone(rows, dataset)
    labels = []
    for where, told, colour, mark, dash in (
        ("stem", "everything fine-tuned", BLUE, "o", "-"),
        ("layer4", "last block fine-tuned", GREEN, "s", "--"),
        ("fc", "features frozen", RED, "^", "-"),
    ):
        points = [(count, each[where]) for count, each in found.items() if where in each]
        if points:
            axes.plot(*zip(*points, strict=True), marker=mark, color=colour, ls=dash)
            labels.append(Label(told, points[-1:], colour))
    if not labels:
        return False
    axes.set_xscale("log")
    axes.set_xticks(list(found), [str(count) for count in found])
    axes.minorticks_off()
    axes.set(xlabel="base classes", ylabel="accuracy on new classes alone (%)")
    _room(axes, found, labels)
    return True


def finetune_depth(axes: Any, rows: Rows, dataset: str) -> bool:
    """Against how much is fine-tuned, one curve for each number of base classes."""
    found = alone(rows, dataset)
    labels = []
    for (count, each), (colour, mark) in zip(found.items(), cycle(BY_COUNT), strict=False):
        points = [(DEPTHS.index(where), each[where]) for where in DEPTHS if where in each]
        axes.plot(*zip(*points, strict=True), marker=mark, color=colour)
        labels.append(Label(str(count), points[-1:], colour))
    if not labels:
        return False
    axes.set(xlabel="fine-tuned from", ylabel="accuracy on new classes alone (%)")
    axes.set_xticks(range(len(DEPTHS)), ["nothing", *DEPTHS[1:-1], "all"])
    top = _room(axes, range(len(DEPTHS)), labels)
    axes.annotate("base\nclasses", (1.015, top), xycoords=("axes fraction", "data"), va="bottom", linespacing=1.0)
    return True


def _room(axes: Any, places: Any, labels: Sequence[Label]) -> float:
    """Labels to the right of the last points, moved apart where they would touch; returns the height above them."""
    axes.set_xlim(right=max(places) * 1.06 if min(places) > 0 else max(places) + 0.15)
    axes.margins(y=0.08)
    bottom, top = axes.get_ylim()
    apart = 0.055 * (top - bottom)
    ordered = sorted(labels, key=lambda label: label.spots[0][1])
    heights: list[float] = [label.spots[0][1] for label in ordered]
    for _ in range(50):  # until none touches another, which a few rounds do
        for lower in range(len(heights) - 1):
            lack = apart - (heights[lower + 1] - heights[lower])
            if lack > 0:
                heights[lower] -= lack / 2
                heights[lower + 1] += lack / 2
    for label, height in zip(ordered, heights, strict=True):
        at = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        axes.annotate(label.words, (1.015, height), color=label.colour, **at)
    return heights[-1] + float(0.7 * apart)


def design_space(axes: Any, rows: Rows, dataset: str) -> bool:
    """Base against novel accuracy: the grid at three values of α, the dial, joint training and routing."""
    place = Path(dataset) / "disjoint-40" / "resnet10"

    def curve(name: str) -> list[dict[str, float]]:
        return (rows.get(place / f"{name}.json") or {}).get("curve") or []

    grid, dial = curve("score-fusion-reference-all"), curve("score-fusion-branchout-all")
    if not grid or not dial:
        return False
    labels: list[Label] = []
    drawn: list[tuple[float, float]] = []
    for alpha, colour, mark in ((0.0, BLUE, "o"), (0.4, GREEN, "s"), (1.0, RED, "^")):
        points = sorted((p["beta"], p["base"], p["novel"]) for p in grid if abs(p["alpha"] - alpha) < 1e-9)
        if points:
            along = [(base, novel) for _, base, novel in points]
            axes.plot(
                *zip(*along, strict=True), marker=mark, ms=3.2, lw=0.8, color=colour, zorder=3, label=f"α = {alpha:g}"
            )
            drawn += along
    if not drawn:
        return False
    for name, told, mark in (
        ("joint-plain", "joint\ntraining", "*"),
        ("confidence-routing-plain", "confidence routing", "X"),
        ("learned-routing-plain", "learned routing", "P"),
        ("logitcat-max-plain", "nothing fused", "d"),
    ):
        row = rows.get(place / f"{name}.json")
        if row is not None:
            at = (row["metrics"]["base"], row["metrics"]["novel"])
            axes.plot(*at, mark, ms=8 if mark == "*" else 5.5, color=INK, mfc=GROUND, mew=0.9, zorder=5)
            drawn.append(at)
            labels.append(Label(told, [at], INK))
    # The ends of a dial, where one side is all but given up, would press everything else into a corner.
    dialled_joint = [rows.get(place / f"joint-dial-{goal}.json") for goal in ("all", "balanced", "avg")]
    joint = curve("joint-dial-all") or [dict(row["metrics"]) for row in dialled_joint if row]
    left, low = min(p[0] for p in drawn), min(p[1] for p in drawn)
    right = max([p["base"] for p in dial] + [p[0] for p in drawn])
    high = max([p["novel"] for p in dial + joint if p["base"] >= left] + [p[1] for p in drawn])
    axes.set_xlim(left - 0.07 * (right - left), right + 0.26 * (right - left))
    axes.set_ylim(low - 0.3 * (high - low), high + 0.12 * (high - low))
    bottom = axes.get_ylim()[0]
    for told, dialled, colour, width, dash, sides in (
        ("our recipe, the dial", dial, INK, 1.5, "-", ("above right", "below left", "left")),
        ("joint\ntraining,\nthe dial", joint, SOFT, 1.2, (0, (4, 2)), ("right", "above right", "above")),
    ):
        along = [(p["base"], p["novel"]) for p in sorted(dialled, key=lambda p: p["novel"])]
        inside = [p for p in along if p[0] >= left and p[1] >= bottom]
        if inside:
            axes.plot(*zip(*along, strict=True), zorder=2, color=colour, lw=width, ls=dash)
            drawn += inside
            labels.append(Label(told, inside[::-1], colour, sides))
    axes.set(xlabel="accuracy on base classes (%)", ylabel="accuracy on new classes (%)")
    title = "score fusion, β from 0 (top) to 1"
    axes.legend(loc="lower left", title=title, alignment="left", **LEGEND)
    _place(axes, labels, drawn)
    return True


LEGEND: dict[str, Any] = {
    "frameon": False, "fontsize": 7.5, "title_fontsize": 7.5, "borderaxespad": 0.2, "labelspacing": 0.25, "ncols": 3,
    "columnspacing": 1.2, "handletextpad": 0.5, "handlelength": 1.4,
}  # fmt: skip


def _place(axes: Any, labels: Sequence[Label], drawn: Sequence[tuple[float, float]]) -> None:
    """Set each label where it covers the least: of the plot's points, of other labels, and of what lies outside."""
    axes.figure.draw_without_rendering()  # so that the layout is settled and places are known
    frame = axes.get_window_extent()
    taken = [axes.get_legend().get_window_extent()]
    points = axes.transData.transform(_dense(drawn))
    for label in labels:
        best = None
        for spot in label.spots:
            for rank, side in enumerate(label.sides):
                text = axes.annotate(label.words, spot, color=label.colour, **_beside(side))
                box = text.get_window_extent()
                text.remove()
                cost = 0.1 * rank + sum(box.padded(1).contains(*point) for point in points)
                cost += 20 * sum(box.padded(1).overlaps(other) for other in taken)
                inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
                cost += 0 if inside else 50
                if best is None or cost < best[0]:
                    best = (cost, spot, side, box)
        assert best is not None
        axes.annotate(label.words, best[1], color=label.colour, zorder=6, linespacing=1.0, **_beside(best[2]))
        taken.append(best[3])


def _dense(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points, and some between neighbours: what a label may not lie on is lines as well."""
    between = [
        (a[0] + (b[0] - a[0]) * part / 4, a[1] + (b[1] - a[1]) * part / 4)
        for a, b in pairwise(points)
        if abs(a[0] - b[0]) + abs(a[1] - b[1]) < 8  # neighbours on a curve, not ends of two
        for part in (1, 2, 3)
    ]
    return [*points, *between]


def _beside(side: str) -> dict[str, Any]:
    across = -1 if "left" in side else 1 if "right" in side else 0
    up = 1 if "above" in side else -1 if "below" in side else 0
    far = 4.5 if across and up else 6.5
    return {
        "xytext": (far * across, far * up),
        "textcoords": "offset points",
        "ha": {-1: "right", 0: "center", 1: "left"}[across],
        "va": {-1: "top", 0: "center", 1: "bottom"}[up],
    }
