"""Write docs/performance.md and its figures from the files in results/speed: python -m benchmarks.speed.page"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.paper.figures import BLUE, GREEN, INK, PALE, RED, STYLE
from benchmarks.speed.inference_page import inference_part
from benchmarks.speed.markdown import DEVICES, Row, Rows, link, number, table
from branchout.files import atomic_write, write_text

ROOT = Path(__file__).parents[2]
COLOURS = (BLUE, RED, GREEN, INK, PALE)


@dataclass(frozen=True)
class Goal:
    """A measured value, and where it should be."""

    title: str
    file: str
    """With {device}."""
    value: Callable[[Row], float]
    goals: Mapping[str, float]
    """By device."""
    more_is_better: bool = False
    reason: str = ""
    """Why a goal is not reached."""
    profile: Callable[[Row], str] = lambda row: ""
    """Where the time goes, from the file."""
    script: str = ""
    """The measurement that writes the file."""

    def reached(self, value: float, device: str) -> bool:
        goal = self.goals[device]
        return value >= goal if self.more_is_better else value <= goal


def ratio(row: Row) -> float:
    return float(row["ratio"])


def products(row: Row) -> str:
    """How much of a grid's time the matrix products take, which no other order of the work avoids."""
    if "products_seconds" not in row:
        return ""
    alone, share = row["products_seconds"] / row["against_seconds"], row["products_seconds"] / row["of_seconds"]
    return (
        f" The matrix products alone, measured beside them, take {share:.0%} of the time of all points and "
        f"{number(alone)} times that of one point with everything that belongs to it: the ratio cannot be less."
    )


def timed_alone(row: Row) -> str:
    """How many of a grid's points were trained by the published procedure; the others take the same time."""
    device = "2 cores" if row["hardware"].endswith("threads") else "the GPU"
    timed = row["settings"]["points_measured_alone"]
    return f" On {device} the published procedure was timed at {timed} of the 36 points."


def spent_on(row: Row) -> str:
    """What an extension spends its time on."""
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row.get("parts", {}).items())
    return f" Of the extension's {row['of_seconds']:.1f} s: {told}." if told else ""


GOALS = (
    Goal(
        "all 36 points of the α×β grid in one pass: times as fast as the published procedure",
        "fusion-published-{device}",
        lambda row: float(row["times_faster"]),
        {"cuda": 100, "cpu": 50},
        more_is_better=True,
        reason="Both run the frozen network on ten views of every exemplar, the published procedure once for each of "
        "36 points. Where the network takes most of the time the factor is about 36, whatever stage II costs. Fewer "
        "views than epochs would raise it, but would no longer train the same.",
        profile=timed_alone,
        script="fusion-grid",
    ),
    Goal(
        "all 36 points against one point alone, both on cached features (180+20 classes)",
        "fusion-grid-{device}-180+20",
        ratio,
        {"cuda": 1.5, "cpu": 6},
        reason="36 points are 36 times the arithmetic. A GPU is not busy with one point; a CPU is, and gains only from "
        "larger matrix products and fewer calls.",
        profile=products,
        script="fusion-grid",
    ),
    Goal(
        "a whole extension against joint training (8 of its 40 epochs timed, the rest extrapolated)",
        "extension-{device}",
        ratio,
        {"cuda": 1 / 12},
        reason="Stage I trains 30 epochs on new images and as many exemplars; joint training 40 epochs on all images.",
        profile=spent_on,
        script="extension",
    ),
    Goal(
        "training at 64 px: share of pure compute that the input pipeline leaves",
        "pipeline-compute-{device}",
        ratio,
        {"cuda": 0.9},
        more_is_better=True,
        reason="Views are cropped and recoloured on the device by several small kernels before each step.",
        script="input-pipeline",
    ),
    Goal(
        "large JPEGs for evaluation, against torchvision's DataLoader",
        "pipeline-jpeg-plain-{device}",
        ratio,
        {"cuda": 1.0, "cpu": 1.0},
        reason="Pillow decodes and resizes in both; nothing else takes time.",
        script="input-pipeline",
    ),
    Goal(
        "large JPEGs in random crops, against torchvision's DataLoader",
        "pipeline-jpeg-views-{device}",
        ratio,
        {"cuda": 1.0, "cpu": 1.0},
        reason="Pillow decodes and resizes in both; nothing else takes time.",
        script="input-pipeline",
    ),
    Goal(
        "a training step as a CUDA graph against one launched kernel by kernel (stage I, ResNet10)",
        "training-step-{device}",
        ratio,
        {"cuda": 1.0},
        reason="The kernels themselves take most of the step.",
        script="training-step",
    ),
    Goal(
        "an image from the server (1 / throughput) against `predict` in a loop",
        "server-{device}",
        ratio,
        {"cuda": 1.0, "cpu": 1.0},
        reason="Clients and server share the machine's cores.",
        script="inference",
    ),
)


def rows_in(folder: Path) -> Rows:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def goals_part(rows: Rows) -> str:
    lines: list[tuple[str, ...]] = [("measured", *DEVICES.values(), "goal")]
    missed, absent = [], []
    for goal in GOALS:
        cells: list[str] = []
        not_reached, profiles = [], ""
        for device in DEVICES:
            name = goal.file.format(device=device)
            row = rows.get(name)
            if row is None:
                cells.append("not measured" if device in goal.goals else "–")
                absent += [(goal.script, device)] if device in goal.goals else []
                continue
            value = goal.value(row)
            wanted = device in goal.goals
            met = wanted and goal.reached(value, device)
            cells.append(
                link(name, number(value)) + (" (goal reached)" if met else " (**not reached**)" if wanted else "")
            )
            if wanted and not met:
                not_reached.append(f"{number(value)} ({DEVICES[device]})")
                profiles += goal.profile(row)
        if not_reached:
            missed.append(f"- {goal.title}: {', '.join(not_reached)}. {goal.reason}{profiles}")
        sign = "≥" if goal.more_is_better else "≤"
        aims = ", ".join(f"{sign} {number(aim)} on {_article(device)}" for device, aim in goal.goals.items())
        lines.append((goal.title, *cells, aims))
    text = ["## Goals", table(*lines)]
    if missed:
        text += ["Goals that are not reached:", "\n".join(missed)]
    for device in DEVICES:
        scripts = dict.fromkeys(script for script, where in absent if where == device)
        if scripts:
            command = f"python -m benchmarks.speed --only {' '.join(scripts)}"
            text.append(f"Not measured yet on {_article(device)}: `{command}`.")
    return "\n\n".join(text)


def _article(device: str) -> str:
    return "a GPU" if device == "cuda" else "2 cores"


def accuracy_part(rows: Rows) -> str:
    lines: list[tuple[str, ...]] = [("on", "(α, β)", "one pass", "published procedure")]
    for device, told in DEVICES.items():
        row = rows.get(f"fusion-published-{device}")
        for point, found in (row["accuracy"] if row else {}).items():
            cells = (f"{100 * found[key]:.1f}%" for key in ("of", "against"))
            lines.append((link(f"fusion-published-{device}", told), point, *cells))
    if len(lines) == 1:
        return ""
    about = (
        "The accuracy of points trained in both ways, on other images of the same classes. Both see ten random views "
        "of every exemplar; the views are drawn in another order, so the figures differ by chance."
    )
    return "\n\n".join(["## Does the grid in one pass train the same?", about, table(*lines)])


def step_part(rows: Rows) -> str:
    row = rows.get("training-step-cuda")
    if row is None:
        return ""
    lines: list[tuple[str, ...]] = [
        ("step", "eager", "CUDA graph", "torch.compile", "largest difference of losses", "of two eager runs")
    ]
    for case in row["cases"]:
        compiled = f"{case['compile_ms']:.1f} ms" if "compile_ms" in case else "–"
        shares = (f"{case[key]:.2%}" for key in ("loss_difference", "loss_difference_of_two_eager_runs"))
        lines.append((case["of"], f"{case['eager_ms']:.1f} ms", f"{case['graph_ms']:.1f} ms", compiled, *shares))
    about = (
        "Milliseconds an iteration on one " + row["hardware"] + " ([file](../results/speed/training-step-cuda.json)). "
        "`fit` records a step on a GPU where a training has at least 100 steps, and prints the choice with its reason. "
        "Steps that wait for the device are found and run as before. A loss that Python changes from step to step must "
        "not be recorded: the first four repeated steps are compared with ordinary ones, which finds it if it differs. "
        "No loss of Branchout does that."
    )
    return "\n\n".join(["## Training step", about, table(*lines), "![Training step](figures/speed-steps.svg)"])


def growth_part(rows: Rows) -> str:
    lines: list[tuple[str, ...]] = [
        ("work", "on", "sizes", "expected", "measured", "time at the largest", "peak memory")
    ]
    for name, row in rows.items():
        if not name.startswith("growth-") or "sizes" not in row:
            continue
        peak = (
            (f"{max(row['peak_bytes']) / 1e6:,.0f} MB" if max(row["peak_bytes"]) > 5e5 else "below 1 MB")
            if "peak_bytes" in row
            else f"{row['bytes'][-1] / 1e6:.1f} MB on disk"
        )
        lines.append(
            (
                row["of"].partition(":")[0],
                DEVICES[name.rpartition("-")[2]],
                f"{row['sizes'][0]:,} to {row['sizes'][-1]:,} {row['unit']}",
                number(row["expected_exponent"]),
                link(name, f"{row['exponent']:.2f}"),
                f"{row['seconds'][-1]:.2f} s",
                peak,
            )
        )
    for name, deltas in (("many-steps", ""), ("many-steps-deltas", ", with deltas")):
        steps = rows.get(name)
        if steps is None:
            continue
        last = steps["steps"][-1]
        for key, told in (("seconds", "a step"), ("bytes", "a saved model")):
            lines.append(
                (
                    told + deltas,
                    steps["hardware"],
                    f"1 to {last['step']} steps",
                    number(steps["expected_exponents"][key]),
                    link(name, f"{steps['exponents'][key]:.2f}"),
                    f"{last['seconds']:.2f} s" if key == "seconds" else "–",
                    f"{last['bytes'] / 1e6:.1f} MB on disk",
                )
            )
    if len(lines) == 1:
        return ""
    about = (
        "The exponent e of time ∝ sizeᵉ (of the bytes, for what is saved): what the arithmetic gives, and the slope "
        "over the larger half of the sizes. Below the expected exponent, fixed costs still weigh; above it, caches no "
        "longer hold the data, or other work on the machine took its share."
    )
    caption = (
        "Solid lines: a GPU; dashed ones: two cores. Each point is the shortest of two or three runs, or a single run "
        "where the first takes 10 seconds or more. The files keep that time alone, so there are no error bars."
    )
    return "\n\n".join(["## Growth", about, table(*lines), "![Growth](figures/speed-growth.svg)", caption])


def page(rows: Rows) -> str:
    gpus = sorted({row["hardware"] for row in rows.values() if row["hardware"].startswith("NVIDIA")}) or ["NVIDIA GPU"]
    first = (
        "# Performance\n\nEach ratio compares two things that are measured in one run of "
        "`python -m benchmarks.speed`: the first divided by the second, of times unless a line says otherwise. The "
        "smaller the better, but where the goal is ≥. Every row links to its file, with commit and hardware.\n\n"
        f"The GPU is an {' or an '.join(gpus)}. The two "
        "CPU cores (x86_64) were shared with other work, so times on them are rough, and some "
        "networks measured there are narrower (key `width`). [All ratios in one table](results/speed.md); `python -m "
        "benchmarks.speed.page` writes this page."
    )
    parts = (first, goals_part(rows), accuracy_part(rows), step_part(rows), growth_part(rows), inference_part(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def draw(rows: Rows, folder: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    with plt.style.context({**STYLE, "figure.dpi": 72}):
        growths = growth_figure(rows)
        if growths is not None:
            _save(growths, folder / "speed-growth.svg")
        steps = rows.get("training-step-cuda")
        if steps:
            figure, axes = plt.subplots(figsize=(6.4, 2.6))
            cases = steps["cases"]
            for shift, key, colour, told in (
                (0.2, "eager_ms", RED, "eager, kernel by kernel"),
                (-0.2, "graph_ms", BLUE, "CUDA graph"),
            ):
                axes.barh(
                    [n + shift for n in range(len(cases))],
                    [case[key] for case in cases],
                    0.38,
                    color=colour,
                    label=told,
                )
            axes.set_yticks(range(len(cases)), [case["of"] for case in cases])
            axes.set_xlabel("milliseconds an iteration")
            axes.legend()
            figure.tight_layout()
            _save(figure, folder / "speed-steps.svg")


def growth_figure(rows: Rows) -> Any:
    """A curve for each work and device; None where there is none."""
    from matplotlib.figure import Figure

    growths = {name: row for name, row in rows.items() if name.startswith("growth-") and "peak_bytes" in row}
    if not growths:
        return None
    figure = Figure(figsize=(6.4, 5), layout="constrained")
    axes = figure.subplots()
    looks = dict(
        zip(dict.fromkeys(map(_work, growths.values())), cycle(zip(COLOURS, "osD^v", strict=True)), strict=False)
    )
    ticks = set()
    for name, row in growths.items():
        multiples = [size / row["sizes"][0] for size in row["sizes"]]
        ticks |= set(multiples)
        (colour, mark), device = looks[_work(row)], name.rpartition("-")[2]
        style = "-" if device == "cuda" else "--"
        told = f"{_work(row)}, {DEVICES[device]}"
        axes.plot(multiples, row["seconds"], style, marker=mark, color=colour, label=told)
    axes.set(xscale="log", yscale="log", xlabel="size, as a multiple of the smallest", ylabel="seconds")
    axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, handlelength=3.5)
    return figure


def _work(row: Row) -> str:
    """What a row measures, and between which sizes."""
    return f"{row['of'].partition(':')[0]},\n{row['sizes'][0]:,} to {row['sizes'][-1]:,} {row['unit']}"


def _save(figure: Any, path: Path) -> None:
    with atomic_write(path) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})


def main() -> None:
    rows = rows_in(ROOT / "results" / "speed")
    draw(rows, ROOT / "docs" / "figures")
    write_text(ROOT / "docs" / "performance.md", page(rows))


if __name__ == "__main__":
    main()
