"""The page about performance, and the names of the measurements."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks.speed.__main__ import NAMES
from benchmarks.speed.common import compared, exponent, seconds_of
from benchmarks.speed.page import growth_figure, page, rows_in

ROOT = Path(__file__).parents[2]


def test_the_page_about_performance_is_what_the_files_say() -> None:
    written = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page(rows_in(ROOT / "results" / "speed")) == written, "run: python -m benchmarks.speed.page"


def test_a_goal_that_is_missed_is_named_with_its_reason() -> None:
    row = {**compared("36 points", "one point", 9.0, 1.0), "hardware": "a CPU"}
    text = page({"fusion-grid-cpu-180+20": row})
    assert "(**not reached**)" in text
    assert "36 times the arithmetic" in text
    reached = page({"fusion-grid-cpu-180+20": {**row, "ratio": 5.0}})
    assert "not reached" not in reached
    assert "goal reached" in reached


def test_the_figure_of_growth_can_be_read() -> None:
    """Its legend is beside the curves and in words, and its ticks are the multiples that were measured."""
    figure = growth_figure(rows_in(ROOT / "results" / "speed"))
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert axes.get_legend() is None
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8", "16"]
    names = [text.get_text() for text in legend.get_texts()]
    assert "an epoch of stage II, one exemplar a class,\n1,250 to 20,000 classes, GPU" in names
    drawn = (ROOT / "docs" / "figures" / "speed-growth.svg").read_text(encoding="utf-8")
    assert all(f">{line}<" in drawn for name in names for line in name.splitlines())


def test_exponents_are_those_of_the_larger_half() -> None:
    sizes = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert exponent(sizes, [size**2 for size in sizes]) == pytest.approx(2)
    assert exponent(sizes, [7.0, 7.0, 16.0, 64.0, 256.0]) == pytest.approx(2)  # fixed costs of small sizes


@pytest.mark.parametrize("name", NAMES)
def test_every_measurement_has_rows(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.speed.{name.replace('-', '_')}").rows)


def test_a_clock_is_read_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device: an Apple GPU computes beside the program too."""
    done: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: done.append("waited"))
    assert seconds_of(lambda: done.append("asked"), torch.device("mps")) >= 0
    assert done == ["waited", "asked", "waited"]
