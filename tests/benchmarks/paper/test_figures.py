"""Figures are drawn from rows alone, the same every time, with bars that end at 100%."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from measured import ROOT, row

from benchmarks.paper.figures import JOINT, OVER_STEPS, bars, draw, half_width
from benchmarks.paper.rows import Row

NAMES = ["fig-base-classes", "fig-finetune-depth", "fig-design-space"]


def test_bars_stay_between_0_and_100() -> None:
    assert bars([99.0, 50.0, 0.5], [3.0, 4.0, 2.0]) == [[3.0, 4.0, 0.5], [1.0, 4.0, 2.0]]


def test_a_bar_has_the_variance_of_images_and_of_the_mean_over_seeds() -> None:
    seeds = [{"novel": 49.0}, {"novel": 50.0}, {"novel": 51.0}]
    found = row("paper/a/b/c-plain.json", novel=50.0, base=50.0, seeds=[1, 2, 3], per_seed=seeds, test_images=10_000)
    assert half_width(found, "novel") == pytest.approx(1.96 * (2500 / 2000 + 1 / 3) ** 0.5)


def written(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_every_figure_is_drawn_and_the_same_every_time(measured_rows: dict[Path, Row], tmp_path: Path) -> None:
    assert draw(measured_rows, tmp_path, ("glyphs",)) == {"glyphs": NAMES}
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*.svg")}
    assert len(texts) == 5
    draw(measured_rows, tmp_path, ())
    assert {path.name: path.read_text() for path in tmp_path.rglob("*.svg")} == texts
    words = {name: written(text) for name, text in texts.items()}
    assert {"Branchout", "best other method", "180 + 20 classes"} <= set(words["overview.svg"])
    assert {"accuracy on new classes (%)", "accuracy on old classes (%)"} <= set(words["fig-design-space.svg"])
    for name, found in words.items():  # no axis goes on beyond 100%
        numbers = [float(word) for word in found if word.replace(".", "").isdigit()]
        assert name == "fig-base-classes.svg" or max(numbers) <= 100


def test_the_caption_of_many_steps_names_who_has_one_seed(measured_rows: dict[Path, Row]) -> None:
    folder = Path("tiny-imagenet-200", "multistep", "resnet18")
    names = {**{name: told for name, (told, *_) in OVER_STEPS.items()}, JOINT: "joint training"}
    assert all(name.endswith("-all") for name in names)  # everyone at the point for the same goal
    single = [told for name, told in names.items() if len(measured_rows[folder / f"{name}.json"].by_seed("all")) == 1]
    text = " ".join((ROOT / "docs" / "many-steps.md").read_text(encoding="utf-8").split())
    assert f"rows with one seed ({', '.join(single)})" in text


def test_without_rows_nothing_is_drawn(tmp_path: Path) -> None:
    assert draw({}, tmp_path, ("glyphs",)) == {}
    assert list(tmp_path.rglob("*.svg")) == []
