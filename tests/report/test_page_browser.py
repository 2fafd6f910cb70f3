"""The report in a real browser: its dial moves every number, and it asks nobody for anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from browsing import Browser, Page, fits, table, turn, visited, with_fixed_dial

from branchout import api
from branchout.data.samples import Samples
from branchout.report.data import ReportData
from branchout.report.page import render
from branchout.units import change, percent, setting


@pytest.fixture(scope="module")
def adjustable(extended: api.Model, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    """The extended model with a dial whose positions are the same on every machine."""
    return with_fixed_dial(extended, val.of_classes(extended.classes), tmp_path_factory.mktemp("dial") / "v2")


@pytest.fixture(scope="module")
def tested(adjustable: api.Model, val: Samples) -> Samples:
    return val.of_classes(adjustable.classes)


@pytest.fixture(scope="module")
def facts(adjustable: api.Model, tested: Samples) -> ReportData:
    return adjustable.facts(tested, gallery=6)


@pytest.fixture(scope="module")
def address(facts: ReportData, tmp_path_factory: pytest.TempPathFactory) -> str:
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(render(facts), encoding="utf-8")
    return page.as_uri()


def at(model: api.Model, facts: ReportData, place: int) -> api.Model:
    """The model at a place of the dial, as `tune` would leave it."""
    *earlier, last = model.saved.fusions
    moved = replace(last, point=facts.points.numbers[place])
    return api.Model(replace(model.saved, fusions=(*earlier, moved)), None)


def shown_tiles(page: Page) -> dict[str, str]:
    names = page.locator(".tile dt").evaluate_all("all => all.map((each) => each.firstChild.textContent.trim())")
    return dict(zip(names, page.locator(".tile dd b").all_text_contents(), strict=True))


def test_numbers_and_pictures_follow_the_dial_and_agree_with_python(
    browser: Browser, address: str, facts: ReportData, adjustable: api.Model, tested: Samples
) -> None:
    saved, last = facts.points.saved, len(facts.points) - 1
    seen = set()
    with visited(browser, address) as page:
        for place in (saved, 0, last, saved):
            turn(page, place)
            found = at(adjustable, facts, place).evaluate(tested)
            tiles = shown_tiles(page)
            assert tiles["base"] == percent(found.after.base)
            assert tiles["novel"] == percent(found.after.novel)
            assert tiles["all"] == percent(found.after.all)
            classes = table(page, "#classes")
            for row in found.classes():
                *_, after, changed, _ = classes[row.name]
                assert after == percent(row.after)
                assert changed == change(row.before, row.after)
            assert found.before is not None
            lost = sum(
                was == label != now
                for was, now, label in zip(facts.test.before, found.answers, found.labels, strict=True)
            )
            assert page.locator("[data-of=forgotten]").text_content().startswith(f"{lost} image")
            assert page.locator("[data-gallery=forgotten] li").count() == min(lost, 6)
            assert page.locator("#moved").is_visible() == (place != saved)
            seen.add(tuple(tiles.values()))
    assert len(seen) == 3


def test_the_dial_is_turned_by_keys_and_by_goals(browser: Browser, address: str, facts: ReportData) -> None:
    points = facts.points
    with visited(browser, address) as page:
        page.focus("#at")
        page.keyboard.press("Home")
        assert page.input_value("#at") == "0"
        told = page.locator("#at").get_attribute("aria-valuetext")
        assert told.startswith(f"{setting(points.settings[0])}: base {percent(facts.test.figures['base'][0])} · ")
        page.keyboard.press("ArrowRight")
        assert page.input_value("#at") == "1"
        page.locator("button.go", has_text="avg").first.click()
        assert page.input_value("#at") == str(points.goals["avg"])
        page.get_by_role("button", name="reset to saved").click()
        assert page.input_value("#at") == str(points.saved)


def test_classes_are_found_and_sorted(browser: Browser, address: str) -> None:
    with visited(browser, address) as page:
        page.get_by_label("Find a class").fill("LETTER")
        visible = page.locator("#classes tbody tr:visible th").all_text_contents()
        assert visible
        assert all("letter" in name for name in visible)
        page.get_by_label("Find a class").fill("")
        page.locator("#classes thead button", has_text="class").click()
        names = page.locator("#classes tbody th").all_text_contents()
        assert names == sorted(names)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, address: str, dark: bool) -> None:
    with visited(browser, address, width=390, dark=dark) as page:
        turn(page, 0)
        assert fits(page)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(23, 25, 28)") == dark


def test_without_images_the_dial_moves_what_there_is(browser: Browser, adjustable: api.Model, tmp_path: Path) -> None:
    facts = adjustable.facts()
    (tmp_path / "report.html").write_text(render(facts), encoding="utf-8")
    with visited(browser, (tmp_path / "report.html").as_uri()) as page:
        for place in (0, len(facts.points) - 1):
            turn(page, place)
            cells = page.locator("tr.live td").all_text_contents()
            assert cells[1:] == [
                percent(values[place]) for values in facts.points.figures.values() if values[0] is not None
            ]
