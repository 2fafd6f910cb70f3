"""The paper's three figures, drawn from measured rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from branchout.bench.claims import alone
from branchout.bench.report import Row, read
from branchout.bench.tables import figures
from branchout.files import in_one_move

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "branchout",  # the same rows give the same file
    "svg.fonttype": "none",
}
DEPTHS = ("fc", "layer4", "layer3", "layer2", "layer1", "stem")
MARKS = ("o", "s", "^", "D", "v", "P")
Rows = Mapping[Path, Row]


def draw(out: Path, dataset: str, folder: Path) -> list[Path]:
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
            figure, axes = pyplot.subplots(figsize=(5.2, 3.6), layout="constrained")
            if painters[name](axes, rows, dataset):
                path = folder / f"{name}.svg"
                with in_one_move(path) as partial:
                    figure.savefig(partial, format="svg", metadata={"Date": None})
                drawn.append(path)
            pyplot.close(figure)
    return drawn


def base_classes(axes: Any, rows: Rows, dataset: str) -> bool:
    """With and without fine-tuning, against the number of base classes."""
    found = alone(rows, dataset)
    if not found:
        return False
    for where, told, mark in (("layer4", "last block fine-tuned", "o"), ("fc", "features frozen", "s")):
        points = [(count, each[where]) for count, each in found.items() if where in each]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker=mark, color="black", ls="-" if mark == "o" else "--", label=told
            )
    axes.set(xlabel="base classes", ylabel="accuracy on new classes alone (%)")
    axes.legend(frameon=False)
    return True


def finetune_depth(axes: Any, rows: Rows, dataset: str) -> bool:
    """Against how much is fine-tuned, one curve for each number of base classes."""
    found = alone(rows, dataset)
    if not found:
        return False
    for (count, each), mark in zip(found.items(), MARKS, strict=False):
        points = [(DEPTHS.index(where), each[where]) for where in DEPTHS if where in each]
        axes.plot(*zip(*points, strict=True), marker=mark, label=f"{count} base classes")
    axes.set(xlabel="fine-tuned from", ylabel="accuracy on new classes alone (%)")
    axes.set_xticks(range(len(DEPTHS)), ["nothing", *DEPTHS[1:-1], "everything"])
    axes.legend(frameon=False)
    return True


def design_space(axes: Any, rows: Rows, dataset: str) -> bool:
    """Base against novel accuracy: the grid at three values of α, the dial, joint training and routing."""
    place = Path(dataset) / "disjoint-40" / "resnet10"
    grid = (rows.get(place / "score-fusion-reference-all.json") or {}).get("curve")
    dial = (rows.get(place / "score-fusion-branchout-all.json") or {}).get("curve")
    if not grid or not dial:
        return False
    for alpha, mark in ((0.0, "o"), (0.4, "s"), (1.0, "^")):
        points = sorted((p["beta"], p["base"], p["novel"]) for p in grid if abs(p["alpha"] - alpha) < 1e-9)
        axes.plot(
            [p[1] for p in points], [p[2] for p in points], marker=mark, ms=4, lw=0.8, label=f"grid, α = {alpha:g}"
        )
    shown = [p for p in dial if p["base"] > 40]
    axes.plot(
        [p["base"] for p in shown], [p["novel"] for p in shown], color="black", lw=1.6, label="our recipe, the dial"
    )
    others = (
        ("joint-plain", "joint training", "*"),
        ("confidence-routing-plain", "confidence routing", "X"),
        ("learned-routing-plain", "learned routing", "P"),
        ("logitcat-max-plain", "nothing trained", "d"),
    )
    for name, told, mark in others:
        row = rows.get(place / f"{name}.json")
        if row is not None:
            axes.plot(
                row["metrics"]["base"], row["metrics"]["novel"], mark, ms=7, color="black", mfc="white", label=told
            )
    axes.set(xlabel="accuracy on base classes (%)", ylabel="accuracy on new classes (%)")
    axes.set_ylim(bottom=min(point["novel"] for point in grid) - 15)
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
    return True
