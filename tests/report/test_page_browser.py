"""The report in a real browser: its dial moves every number, and it asks nobody for anything."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browsing import DIAL, Browser, Page, fits, table, turn, until, visited, with_fixed_dial

from branchout import api
from branchout.data.samples import Samples
from branchout.report.counts import counts_at
from branchout.report.data import ReportData
from branchout.report.page import render
from branchout.units import percent, setting, signed


@pytest.fixture(scope="module")
def adjustable(extended: api.Model, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    """The extended model with a dial whose positions are the same on every machine."""
    return with_fixed_dial(extended, val.of_classes(extended.classes), tmp_path_factory.mktemp("dial") / "v2")


@pytest.fixture(scope="module")
def tested(adjustable: api.Model, val: Samples) -> Samples:
    return val.of_classes(adjustable.classes)


@pytest.fixture(scope="module")
def facts(adjustable: api.Model, tested: Samples) -> ReportData:
    return adjustable.report_data(tested, gallery=6)


@pytest.fixture(scope="module")
def address(facts: ReportData, tmp_path_factory: pytest.TempPathFactory) -> str:
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(render(facts), encoding="utf-8")
    return page.as_uri()


def at(model: api.Model, facts: ReportData, place: int) -> api.Model:
    """The model at a place of the dial, as `tune` would leave it."""
    *earlier, last = model.saved.step_points
    moved = replace(last, point=facts.points.numbers[place])
    return api.Model(replace(model.saved, step_points=(*earlier, moved)), None)


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
            assert found.before is not None
            tiles = shown_tiles(page)
            assert tiles["base"] == percent(found.after.base)
            assert tiles["novel"] == percent(found.after.novel)
            assert tiles["all"] == percent(found.after.all)
            classes = table(page, "#classes")
            for row in found.classes():
                *_, after, changed, _ = classes[row.name]
                assert after == f"{round(8 * row.after)}/8"
                images = None if row.before is None else round(8 * (row.after - row.before))
                assert changed.split(" ")[0] == ("" if images is None else signed(images))
            counts = counts_at(facts, place)
            old, part = counts.old, counts.parts[0]
            shown = page.locator("[data-part-images='0']").text_content()
            assert shown.startswith(f"{signed(part.change)} of {part.images} images")
            assert ("within noise" in shown) == (part.noise and part.change != 0)
            assert part.right - part.change == round(part.images * found.before.base)
            title = page.locator("h1").text_content()
            assert f"it answers {percent(old.after / old.images)}% right" in title
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
        assert setting(points.settings[0]) in told
        assert f": base {percent(facts.test.figures['base'][0])} · " in told
        page.keyboard.press("ArrowRight")
        assert page.input_value("#at") == "1"
        page.locator("button.go", has_text="avg").first.click()
        assert page.input_value("#at") == str(points.goals["avg"])
        turn(page, 0)
        page.get_by_role("button", name="Back to saved").click()
        assert page.input_value("#at") == str(points.saved)
        assert page.locator("#reset").is_disabled()
        page.get_by_role("button", name="Undo").click()
        assert page.input_value("#at") == "0"
        for chip in page.locator(".chip").all():
            chip.click()
            goal = chip.text_content().strip().split(", ")[0]
            assert page.input_value("#at") == str(points.goals[goal])


def test_the_dial_tells_its_cost_in_images(browser: Browser, address: str, facts: ReportData) -> None:
    test, saved, last = facts.test, facts.points.saved, len(facts.points) - 1
    here = np.array(test.labels) == test.answers.at(saved)
    with visited(browser, address) as page:
        for place in (0, last):
            turn(page, place)
            there = np.array(test.labels) == test.answers.at(place)
            lost, won = int((here & ~there).sum()), int((~here & there).sum())
            told = page.locator("#cost").text_content()
            assert re.findall(r"gives up (\d+) .*wins (\d+) ", told) == [(str(lost), str(won))]
        assert lost
        page.get_by_role("button", name=re.compile("gives up")).click()
        assert page.locator("#view-title").text_content().startswith(f"{lost} image")


def test_a_class_a_cell_and_a_point_lead_to_their_images(browser: Browser, address: str, facts: ReportData) -> None:
    counts = counts_at(facts, facts.points.saved)
    with visited(browser, address) as page:
        cell = page.locator("#parts tr", has_text="base").locator("[data-wrong] .pick").first
        number = cell.text_content()
        cell.click()
        assert page.locator("#view-title").text_content().startswith(f"{number} image")
        page.keyboard.press("Escape")
        assert not page.locator("#view").is_visible()
        row = counts.classes[0]
        name = facts.classes[row.number]
        page.locator("#classes .pick", has_text=name).first.click()
        page.wait_for_selector("#view[open]")  # the address changes first, and the window follows it
        assert page.locator("#view-title").text_content() == f"{row.images} images of “{name}”"
        assert "of them are in this file; branchout serve shows all" in page.locator("#view").text_content()
        page.keyboard.press("Escape")
        page.locator(".plot .test [data-point='0'] .dot").click(force=True)
        page.wait_for_selector("#view[open]")
        assert page.input_value("#at") == "0"
        assert "given up compared with the saved point" in page.locator("#view-title").text_content()
        page.get_by_role("button", name=re.compile("won$")).click()
        assert "won compared with the saved point" in page.locator("#view-title").text_content()
        assert "change=won" in page.url


@pytest.fixture(scope="module")
def apart(facts: ReportData, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report whose validation images gave other accuracies: its dashed line lies beside the one of the report."""
    moved = {name: [v if v is None else v * 0.8 for v in values] for name, values in facts.points.figures.items()}
    page = tmp_path_factory.mktemp("page") / "apart.html"
    page.write_text(render(replace(facts, points=replace(facts.points, figures=moved))), encoding="utf-8")
    return page.as_uri()


@pytest.mark.parametrize("images", ["dev", "test"])
def test_every_point_of_the_chart_opens_its_own_images(
    browser: Browser, apart: str, facts: ReportData, images: str
) -> None:
    with visited(browser, apart) as page:
        for place in range(len(facts.points)):
            dot = page.locator(f".plot .{images} [data-point='{place}'] .dot")
            dot.dispatch_event("click")  # a pointer may meet another point at the same spot
            page.wait_for_selector("#view[open]")
            assert page.input_value("#at") == str(place)
            page.keyboard.press("Escape")


def test_points_of_the_chart_are_reached_by_keyboard(browser: Browser, apart: str, facts: ReportData) -> None:
    focused = "document.activeElement.closest('.plot [data-point]')?.dataset.point ?? null"
    saved = facts.points.saved
    with visited(browser, apart) as page:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(focused) is not None:
                break
        assert page.evaluate(focused) == str(saved)
        assert page.evaluate("document.activeElement.ariaLabel").startswith(setting(facts.points.settings[saved]))
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(focused) == str(saved - 1)
        page.keyboard.press("Enter")
        page.wait_for_selector("#view[open]")
        assert page.input_value("#at") == str(saved - 1)
        page.keyboard.press("Escape")
        reached = {page.evaluate("document.activeElement.ariaLabel")}
        for _ in range(2 * len(facts.points)):
            page.keyboard.press("ArrowUp")
            reached.add(page.evaluate("document.activeElement.ariaLabel"))
        for _ in range(2 * len(facts.points)):
            page.keyboard.press("ArrowDown")
            reached.add(page.evaluate("document.activeElement.ariaLabel"))
        assert len(reached) == 2 * len(facts.points)  # on both sets of images


def test_tables_of_confusions_appear_and_disappear_with_the_dial(
    browser: Browser, facts: ReportData, tmp_path: Path
) -> None:
    last = len(facts.points) - 1
    assert not counts_at(facts, 0).to_later
    assert not counts_at(facts, last).to_earlier
    file = tmp_path / "report.html"
    file.write_text(render(replace(facts, points=replace(facts.points, saved=0))), encoding="utf-8")
    with visited(browser, file.as_uri()) as page:
        shown = [page.locator(f"#{key}").is_visible() for key in ("to-later", "to-earlier")]
        turn(page, last)
        shown += [page.locator(f"#{key}").is_visible() for key in ("to-later", "to-earlier")]
    assert shown == [False, True, True, False]


def test_arrow_keys_do_nothing_where_no_image_belongs(browser: Browser, address: str, facts: ReportData) -> None:
    empty = f"#images?class={facts.classes[0]}&answer=nothing"
    with visited(browser, address + empty.replace(" ", "%20")) as page:
        page.wait_for_selector("#view[open]")
        assert page.locator("#view .large").count() == 0
        page.keyboard.press("ArrowRight")
        page.keyboard.press("End")


def test_arrow_keys_walk_and_a_link_leads_back(browser: Browser, address: str, facts: ReportData) -> None:
    with visited(browser, address) as page:
        page.locator("[data-gallery=gained] .look").first.click()
        assert page.locator(".where").text_content().startswith("1 of ")
        page.keyboard.press("ArrowRight")
        assert page.locator(".where").text_content().startswith("2 of ")
        label = page.locator(".large h3").text_content()
        told = page.locator(".said").text_content()
        assert "✓ right now" in told
        assert "Share of each branch" in told
        shares = [float(each) for each in re.findall(r"([\d.]+)%", told)]
        assert sum(shares) == pytest.approx(100, abs=0.21)
        link = page.url
        page.keyboard.press("Escape")
        until(page, "location.hash === ''")
    with visited(browser, link) as page:
        assert page.locator("#view").is_visible()
        assert page.locator(".large h3").text_content() == label
        page.keyboard.press("End")
        assert page.locator(".step").nth(1).is_disabled()
    with visited(browser, f"{address}#at=1") as page:
        assert page.input_value("#at") == "1"


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


def test_a_search_without_a_match_says_so_and_can_be_cleared(browser: Browser, address: str) -> None:
    with visited(browser, address) as page:
        page.get_by_label("Find a class").fill("zebra")
        assert "No class matches “zebra”" in page.locator("#per-class .matches").text_content()
        assert not page.locator("#classes").is_visible()
        page.get_by_role("button", name="Clear the search").click()
        assert page.locator("#classes tbody tr:visible").count() == 11
        assert page.locator("#per-class .matches").text_content() == ""
        assert page.evaluate("document.activeElement.type") == "search"


def test_a_link_leads_to_the_same_search_order_and_gallery(browser: Browser, address: str) -> None:
    with visited(browser, address) as page:
        page.get_by_label("Find a class").fill("letter")
        page.locator("#classes thead button", has_text="after").click()
        page.locator("#to-later thead button", has_text="answered with").click()
        page.locator("[data-only=gained]").select_option(label="step 1")
        turn(page, 0)
        link = page.url
        names = page.locator("#classes tbody tr:visible th").all_text_contents()
        pairs = page.locator("#to-later tbody tr").all_text_contents()
        page.locator("#classes .pick:visible").first.click()
        page.wait_for_selector("#view[open]")
        assert "find=letter" in page.url
        page.keyboard.press("Escape")
        until(page, f"location.href === {link!r}")
    with visited(browser, link) as page:
        assert page.get_by_label("Find a class").input_value() == "letter"
        assert page.locator("#classes tbody tr:visible th").all_text_contents() == names
        assert page.locator("#to-later tbody tr").all_text_contents() == pairs
        assert page.locator("[data-only=gained] option:checked").text_content() == "step 1"
        assert page.input_value("#at") == "0"
        page.locator("nav a", has_text="Forgotten").click()
        until(page, "location.hash.startsWith('#forgotten?') && location.hash.includes('find=letter')")


def total_of(page: Page, kind: str) -> int:
    return int(page.locator(f"[data-gallery={kind}]").get_attribute("data-total"))


def test_as_many_images_are_shown_as_are_counted(
    browser: Browser, adjustable: api.Model, tested: Samples, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text(render(adjustable.report_data(tested, gallery=15)), encoding="utf-8")
    seen = "all => all.filter((each) => each.getBoundingClientRect().width).length"
    with visited(browser, (tmp_path / "report.html").as_uri()) as page:
        turn(page, len(DIAL) - 1)  # forgets many images, whatever the processor
        for more in (False, True):
            for kind in ("forgotten", "gained"):
                button = page.locator(f"[data-more={kind}]")
                if more and (kind == "forgotten" or button.is_visible()):
                    button.click()
                assert button.is_visible() == (not more and total_of(page, kind) > 12)
                words = page.locator(f"[data-of={kind}]").text_content()
                total, *shown = (int(number) for number in re.findall(r"\d+", words))
                images = page.locator(f"[data-gallery={kind}] li")
                assert images.evaluate_all(seen) == (shown or [total])[0] == min(total, 15 if more else 12)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, address: str, dark: bool) -> None:
    with visited(browser, address, width=390, dark=dark) as page:
        turn(page, 0)
        assert fits(page)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(23, 25, 28)") == dark


def test_without_images_the_dial_moves_what_there_is(browser: Browser, adjustable: api.Model, tmp_path: Path) -> None:
    facts = adjustable.report_data()
    (tmp_path / "report.html").write_text(render(facts), encoding="utf-8")
    with visited(browser, (tmp_path / "report.html").as_uri()) as page:
        for place in (0, len(facts.points) - 1):
            turn(page, place)
            cells = page.locator("tr.live td").all_text_contents()
            assert cells[1:] == [
                percent(values[place]) for values in facts.points.figures.values() if values[0] is not None
            ]
