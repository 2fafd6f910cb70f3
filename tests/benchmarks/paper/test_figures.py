"""Figures are drawn from rows alone, the same every time, with words that lie on no other words."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from measured import PLACE, alone, row, write

from benchmarks.paper import figures
from benchmarks.paper.figures import STYLE, draw
from benchmarks.paper.page import PAINTS
from benchmarks.paper.report import read

DEPTHS = ("fc", "layer4", "layer3", "layer2", "layer1", "stem")


def rows(out: Path) -> None:
    """Of all three figures; last points that lie close together, as measured ones do."""
    grid = [
        {"alpha": a / 5, "beta": b / 5, "base": 58.0 - a / 2 + b / 3, "novel": 60.0 + a - b}
        for a in range(6)
        for b in range(6)
    ]
    dial = [{"b": float(n), "base": 62.0 - n * n / 4, "novel": 12.0 * n**0.8} for n in range(9)]
    joint = [{**point, "base": point["base"] + 0.5} for point in dial]
    for name, point, curve in (
        ("score-fusion-reference", "all", grid),
        ("score-fusion-branchout", "all", dial),
        ("joint", "dial-all", joint),
    ):
        write(out, [(name, point, {**row(name, point, all=61.0, base=62.0, novel=55.0, avg=58.5), "curve": curve})])
    for name, base, novel in (
        ("joint", 62.0, 57.0),
        ("confidence-routing", 45.0, 70.0),
        ("learned-routing", 55.0, 50.0),
        ("logitcat-max", 59.0, 58.0),
    ):
        write(out, [(name, "plain", row(name, "plain", base=base, novel=novel))])
    alone(out, {n: {where: 70.0 + n / 100 + deep for deep, where in enumerate(DEPTHS)} for n in (20, 40, 80, 180)})


def test_only_what_has_rows_is_drawn(tmp_path: Path) -> None:
    write(tmp_path, [("joint", "plain", row("joint", "plain", base=62.0, novel=57.0))])
    assert draw(tmp_path, "toys", tmp_path / "figures") == []
    alone(tmp_path, {20: {"fc": 50.0, "layer4": 60.0}})
    drawn = draw(tmp_path, "toys", tmp_path / "figures")
    assert [path.stem for path in drawn] == ["fig-base-classes", "fig-finetune-depth"]


def test_figures_are_the_same_every_time_and_say_what_they_show(tmp_path: Path) -> None:
    rows(tmp_path)
    drawn = draw(tmp_path, "toys", tmp_path / "figures")
    assert [path.stem for path in drawn] == ["fig-base-classes", "fig-finetune-depth", "fig-design-space"]
    texts = [path.read_text() for path in drawn]
    assert [path.read_text() for path in draw(tmp_path, "toys", tmp_path / "figures")] == texts
    shown = []
    for text in texts:
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        shown.append({"".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")})
    assert {"everything fine-tuned", "last block fine-tuned", "features frozen", "20", "180"} <= shown[0]
    assert {"20", "40", "80", "180", "nothing", "layer4", "all"} <= shown[1]
    wanted = {"α = 0", "α = 0.4", "α = 1", "our recipe, the dial", "the dial", "confidence routing"}
    assert wanted | {"learned routing", "nothing fused"} <= shown[2]


def test_every_colour_has_a_name_that_a_dark_page_can_change(tmp_path: Path) -> None:
    rows(tmp_path)
    for path in draw(tmp_path, "toys", tmp_path / "figures"):
        drawn = re.sub(r"<metadata>.*?</metadata>", "", path.read_text(), flags=re.DOTALL)
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= set(PAINTS)


@pytest.mark.parametrize("painter", [figures.base_classes, figures.finetune_depth, figures.design_space])
def test_no_words_lie_on_others_or_outside(painter: Any, tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows(tmp_path)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=figures.SIZE, layout="constrained")
        assert painter(axes, read(tmp_path), "toys")
        figure.draw_without_rendering()
        legend = axes.get_legend()
        words = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        boxes = {text.get_text(): text.get_window_extent() for text in words if text.get_text()}
        if legend is not None:
            boxes["legend"] = legend.get_window_extent()
        pyplot.close(figure)
    assert len(axes.texts) >= 3
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), f"{one} lies on {other}"
    for told, box in boxes.items():
        assert box.x0 >= -1, told
        assert box.x1 <= figure.bbox.x1 + 1, told


def test_the_grid_is_drawn_at_three_values_of_alpha_with_all_of_beta(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows(tmp_path)
    grid = read(tmp_path)[PLACE / "score-fusion-reference-all.json"]["curve"]
    _, axes = pyplot.subplots()
    figures.design_space(axes, read(tmp_path), "toys")
    curves = {line.get_label(): line for line in axes.lines}
    for alpha in (0.0, 0.4, 1.0):
        expected = [(p["base"], p["novel"]) for p in grid if abs(p["alpha"] - alpha) < 1e-9]
        assert len(expected) == 6
        assert curves[f"α = {alpha:g}"].get_xydata().tolist() == [list(point) for point in expected]
    pyplot.close("all")
