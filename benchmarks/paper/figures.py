"""The chart of the first screen, the paper's figures and accuracy over many steps, with 95% intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.rows import Row, Rows, row_of
from benchmarks.paper.tables import scenarios
from branchout.bench.tables import BY_BASE, base_class_counts
from branchout.files import atomic_write

INK, SOFT, RULE, GROUND = "#1a1a1a", "#5f6368", "#e3e3e3", "#ffffff"
BLUE, RED, GREEN, PALE = "#0072b2", "#b34a00", "#00795a", "#56a0cf"
"""Can be told apart without colour vision, and the marks differ too."""
STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"], "font.size": 8, "axes.labelsize": 8, "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": SOFT, "axes.facecolor": GROUND, "figure.facecolor": GROUND,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": RULE, "grid.linewidth": 0.6, "lines.linewidth": 1.2, "lines.markersize": 4.5,
    "legend.frameon": False, "legend.fontsize": 8, "svg.hashsalt": "branchout", "svg.fonttype": "none",
}  # fmt: skip
DEPTHS = ("fc", "layer4", "layer3", "layer2", "layer1", "stem")
Painter = Callable[[Any, Rows, str], bool]


def half_width(row: Row, metric: str) -> float:
    """Half of a 95% interval, from the number of test images and from seeds."""
    spread = row.spread(metric) or 0.0
    return 1.96 * math.sqrt(row.image_variance(metric) + spread**2 / max(len(row.by_seed(metric)), 1))


def bars(values: Sequence[float], halves: Sequence[float]) -> list[list[float]]:
    """Error bars that stay between 0 and 100%."""
    pairs = list(zip(values, halves, strict=True))
    return [[min(half, value) for value, half in pairs], [min(half, 100 - value) for value, half in pairs]]


def plot(axes: Any, rows: Mapping[float, Row], metric: str, label: str, colour: str, mark: str, **more: Any) -> None:
    """One curve with error bars."""
    values = [row.value(metric) or 0.0 for row in rows.values()]
    error = bars(values, [half_width(row, metric) for row in rows.values()])
    style = {"capsize": 2, "elinewidth": 0.8, "ls": "-", **more}
    axes.errorbar(list(rows), values, yerr=error, label=label, color=colour, marker=mark, **style)


def overview(axes: Any, rows: Rows, _: str) -> bool:
    """The first screen: one line for each scenario."""
    shown, drawn = scenarios(rows), []
    for name, of, colour, mark, size in (
        ("joint training with the dial (sees all images)", "joint", SOFT, "*", 9),
        ("best other method", "rival", RED, "D", 4.5),
        ("the paper's recipe", "reference", GREEN, "s", 4.8),
        ("Branchout", "ours", BLUE, "o", 7),
    ):
        shift = {"joint": -0.24, "rival": 0.24, "reference": 0.08, "ours": -0.1}[of]
        found = [(place + shift, getattr(each, of)) for place, each in enumerate(shown) if getattr(each, of)]
        drawn += [row for _, row in found]
        values = [row.value("balanced") for _, row in found]
        error = bars(values, [half_width(row, "balanced") for _, row in found])
        axes.errorbar(
            values, [place for place, _ in found], xerr=error, label=name, color=colour, marker=mark, ms=size, ls="",
            mew=0, elinewidth=0.8, capsize=0,
        )  # fmt: skip
        marked = [(row.value("balanced") or 0.0, place) for place, row in found if row.marks]
        if marked:
            axes.plot(*zip(*marked, strict=True), color=GROUND, marker=mark, ms=0.55 * size, ls="", mew=0, zorder=4)
    axes.set_yticks(range(len(shown)), [each.name for each in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    for place in range(1, len(shown)):
        axes.axhline(place - 0.5, color=RULE, lw=0.5 if place > 1 else 1.2, zorder=0)
    hollow = ", hollow: marked † or ‡ in the table" if any(row.marks for row in drawn) else ""
    axes.set_xlabel(f"balanced accuracy (%), bars: 95% intervals{hollow}")
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles[::-1], labels[::-1], ncols=4, loc="outside upper center", columnspacing=2.2)
    return bool(shown)


def _alone(rows: Rows, dataset: str, where: str) -> dict[float, Row]:
    """Branches that learned new classes alone, by the number of base classes."""
    counts = base_class_counts(dataset)
    found = {count: row_of(rows, dataset, f"{BY_BASE}-{count}", "resnet10", f"alone-{where}-alone") for count in counts}
    return {count: row for count, row in found.items() if row}


def base_classes(axes: Any, rows: Rows, dataset: str) -> bool:
    """With and without fine-tuning, against the number of base classes."""
    for where, told, colour, mark in (
        ("stem", "everything fine-tuned", BLUE, "o"),
        ("layer4", "last block fine-tuned", GREEN, "s"),
        ("fc", "features frozen", RED, "^"),
    ):
        found = _alone(rows, dataset, where)
        if not found:
            return False
        plot(axes, found, "alone", told, colour, mark)
    axes.set_xscale("log")
    axes.set_xticks(list(found), [f"{count:g}" for count in found])
    axes.minorticks_off()
    axes.set(xlabel="base classes", ylabel="accuracy on new classes alone (%)")
    axes.legend(loc="lower right")
    return True


def finetune_depth(axes: Any, rows: Rows, dataset: str) -> bool:
    """Against how much is fine-tuned, one curve for each number of base classes."""
    by_depth = {where: _alone(rows, dataset, where) for where in DEPTHS}
    for count, colour, mark in zip(base_class_counts(dataset), (PALE, BLUE, GREEN, INK), "os^D", strict=False):
        found = {float(place): by_depth[where][count] for place, where in enumerate(DEPTHS) if count in by_depth[where]}
        if not found:
            return False
        plot(axes, found, "alone", f"{count} base classes", colour, mark)
    axes.set(xlabel="fine-tuned from", ylabel="accuracy on new classes alone (%)")
    axes.set_xticks(range(len(DEPTHS)), ["nothing", *DEPTHS[1:-1], "all"])
    axes.legend(loc="lower right")
    return True


def design_space(axes: Any, rows: Rows, dataset: str) -> bool:
    """New against old accuracy: the grid at three values of α, the dial, joint training and routing."""

    def found(name: str) -> Row | None:
        return row_of(rows, dataset, "disjoint-40", "resnet10", name)

    grid, dial, joint = (
        found("score-fusion-reference-all"),
        found("score-fusion-branchout-all"),
        found("joint-dial-all"),
    )
    if not grid or not dial or not grid.data["curve"] or not dial.data["curve"]:
        return False
    for alpha, colour, mark in ((0.0, PALE, "o"), (0.4, GREEN, "s"), (1.0, RED, "^")):
        points = sorted((at["beta"], at["base"], at["novel"]) for at in grid.data["curve"] if at["alpha"] == alpha)
        across, up = [at[1] for at in points], [at[2] for at in points]
        axes.plot(across, up, color=colour, marker=mark, ms=3.5, lw=0.8, label=f"paper's grid, α = {alpha:g}", zorder=3)
    for row, told, colour, dash in (
        (dial, "Branchout, the dial", BLUE, "-"),
        (joint, "joint training, the dial", SOFT, "--"),
    ):
        curve = [(at["base"], at["novel"]) for at in (row.data["curve"] if row else None) or ()]  # in the dial's order
        if curve:
            axes.plot(*zip(*curve, strict=True), color=colour, ls=dash, lw=1.6, label=told, zorder=2)
    marks = []
    for name, told, mark in (
        ("joint-plain", "joint training", "*"), ("confidence-routing-plain", "confidence routing", "X"),
        ("learned-routing-plain", "learned routing", "P"),
    ):  # fmt: skip
        row = found(name)
        if row:
            at = [row.value(part) or 0.0 for part in ("base", "novel")]
            error = [bars([value], [half_width(row, part)]) for value, part in zip(at, ("base", "novel"), strict=True)]
            style = {"ms": 7, "mfc": GROUND, "elinewidth": 0.7, "ls": "", "zorder": 5}
            axes.errorbar(*at, xerr=error[0], yerr=error[1], marker=mark, color=INK, label=told, **style)
            marks.append(at)
    # The ends of a dial, where one side is given up, would press everything else together.
    near = [(at["base"], at["novel"]) for at in grid.data["curve"]] + [(at[0], at[1]) for at in marks]
    low_x, low_y = (min(at[axis] for at in near) for axis in (0, 1))
    high = max(at["base"] for at in dial.data["curve"])
    axes.set_xlim(max(low_x - 4, 0), min(high + 2, 100))
    axes.set_ylim(max(low_y - 12, 0), min(max(at[1] for at in near) + 6, 100))
    axes.set(xlabel="accuracy on old classes (%)", ylabel="accuracy on new classes (%)")
    axes.legend(loc="lower left", fontsize=7, ncols=1, labelspacing=0.3)
    return True


OVER_STEPS = {
    "score-fusion-branchout-all": ("Branchout", BLUE, "o"),
    "score-fusion-reference-all": ("the paper's recipe", GREEN, "s"),
    "fa-bic-dial-all": ("FA+BiC", PALE, "v"),
    "bic-dial-all": ("BiC", RED, "D"),
    "podnet-dial-all": ("PODNet", INK, "^"),
}
"""Everyone at the point that dev images choose for the goal `all` after each step."""
JOINT = "joint-dial-all"


def many_steps(axes: Any, rows: Rows, dataset: str) -> bool:
    """Accuracy on all classes seen so far, after each of ten steps, with ResNet18."""
    end = 0
    for name, (told, colour, mark) in OVER_STEPS.items():
        row = row_of(rows, dataset, "multistep", "resnet18", name)
        if row and row.data.get("per_step"):
            steps = [list(seeds) for seeds in zip(*row.data["per_step"], strict=True)]
            values = [row.data["base_model"], *(sum(at["all"] for at in each) / len(each) for each in steps)]
            count = sum(row.images().values()) / 2 / len(steps)  # as many images in each step; the base has half
            images = [count * (len(steps) + place) for place in range(len(values))]
            several = len(row.by_seed("all")) > 1  # not where all seeds share one stage I
            spreads = [0.0, *(statistics.stdev(at["all"] for at in each) if several else 0.0 for each in steps)]
            halves = [
                1.96 * math.sqrt(at * (100 - at) / count + spread**2 / len(steps[0]))
                for at, count, spread in zip(values, images, spreads, strict=True)
            ]
            error = bars(values, halves)
            axes.errorbar(
                range(len(values)), values, yerr=error, label=told, color=colour, marker=mark, capsize=2, elinewidth=0.7
            )
            end = max(end, len(steps))
    joint = row_of(rows, dataset, "multistep", "resnet18", JOINT)
    if joint:
        plot(axes, {float(end): joint}, "all", "joint training", SOFT, "*", ls="", ms=8)
    if not end:
        return False
    axes.set(xlabel="steps of ten new classes", ylabel="accuracy on all classes so far (%)")
    axes.set_xticks(range(end + 1))
    axes.legend(loc="lower left")
    return True


FIGURES: dict[str, Painter] = {
    "fig-base-classes": base_classes,
    "fig-finetune-depth": finetune_depth,
    "fig-design-space": design_space,
}


def draw(rows: Rows, folder: Path, datasets: Sequence[str]) -> dict[str, list[str]]:
    """Draw everything that has rows; returns the names of the paper's figures, by dataset."""
    drawn: dict[str, list[str]] = {}
    _save(overview, rows, "", folder / "overview.svg", (9.6, 3.7))
    _save(many_steps, rows, "tiny-imagenet-200", folder / "many-steps.svg", (4.6, 3.0))
    for dataset in datasets:
        for name, painter in FIGURES.items():
            if _save(painter, rows, dataset, folder / dataset / f"{name}.svg", (4.6, 3.4)):
                drawn.setdefault(dataset, []).append(name)
    return drawn


def _save(painter: Painter, rows: Rows, dataset: str, path: Path, size: tuple[float, float]) -> bool:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        done = painter(axes, rows, dataset)
        for axis in (axes.xaxis, axes.yaxis):
            first, last = axis.get_view_interval()
            if "%" in axis.get_label_text() and last > 100:  # an accuracy ends there
                axis.set_view_interval(first, 100, ignore=True)
        if done:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                figure.savefig(partial, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return done
