"""The pages as people look at them: at three widths, light and dark, and in print; by axe, by eye and by keyboard.

Screenshots are written to the folder of the environment variable BRANCHOUT_SCREENSHOTS, if it is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import DIAL, Browser, Page, fits, turn, until, visited, with_fixed_dial
from helpers import BASE, NEW
from inbox_case import make
from serving import Caller, png, running

from branchout import api
from branchout.data.samples import Samples
from branchout.inbox.folder import Inbox
from branchout.report.page import render
from branchout.serve.app import create_app
from branchout.serve.inbox import InboxSettings

WIDTHS = (390, 768, 1400)


@pytest.fixture(scope="module")
def adjustable(extended: api.Model, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    return with_fixed_dial(extended, val.of_classes(extended.classes), tmp_path_factory.mktemp("dial") / "v2")


@pytest.fixture(scope="module")
def server(
    adjustable: api.Model, base: api.Model, train: Samples, val: Samples, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Caller]:
    case = make(tmp_path_factory.mktemp("inbox"), base, train)
    inbox = Inbox(case.photos)
    inbox.decide(inbox.photos()[:3], "robin")
    inbox.decide(inbox.photos()[3:4], None)
    settings = InboxSettings(case.photos, threshold=-100.0)
    with running(create_app(adjustable, test=val.of_classes(adjustable.classes), inbox=settings)) as caller:
        yield caller


@pytest.fixture(scope="module")
def addresses(
    adjustable: api.Model, val: Samples, server: Caller, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    pages = tmp_path_factory.mktemp("page")
    report, single = pages / "report.html", pages / "single.html"
    single.write_text(render(with_one_point(adjustable).report_data()), encoding="utf-8")
    report.write_text(render(adjustable.report_data(val.of_classes(adjustable.classes), gallery=40)), encoding="utf-8")
    here = f"http://127.0.0.1:{server.port}/"
    return {
        "report": report.as_uri(),
        "single": single.as_uri(),
        "images": f"{report.as_uri()}#images?change=gained",
        "served": here,
        "docs": f"{here}docs",
        "inbox": f"{here}inbox",
    }


def with_one_point(model: api.Model) -> api.Model:
    *earlier, last = model.saved.step_points
    frontier = model.frontier.select(np.array([last.point]))
    points = replace(last, frontier=frontier.to_dict(), point=0)
    return api.Model(replace(model.saved, step_points=(*earlier, points)), None, model.device)


def kept(page: Page, name: str) -> None:
    folder = os.environ.get("BRANCHOUT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def shown(page: Page, kind: str, samples: Samples) -> None:
    """Wait for a page; the served one gets two images to classify."""
    if kind == "inbox":
        page.wait_for_selector("#groups .photo", timeout=60_000)  # the first groups import scikit-learn
    if kind == "served":
        page.wait_for_selector("#classes .pick")
        page.wait_for_selector("#apply", state="attached")
        rows = [int(np.flatnonzero(samples.names == name)[0]) for name in (NEW[0], BASE[0])]
        files = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": png(samples.read(n))} for n in rows]
        page.set_input_files("#files", files)
        page.wait_for_selector("#answers > li:nth-child(2) .top")


def covered_labels(page: Page) -> list[str]:
    """Pairs of labels in the chart, or controls of the dial, that overlap."""
    found: list[str] = page.evaluate(
        """() => [
          ".plot svg text",
          "#dial button:not(.pick), #dial output, #dial .ends span, #cost",
        ].flatMap((selector) => {
          const boxes = [...document.querySelectorAll(selector)]
            .map((each) => [each.textContent, each.getBoundingClientRect()]).filter(([, box]) => box.width);
          return boxes.flatMap(([one, a], n) => boxes.slice(n + 1).flatMap(([other, b]) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2
              ? [`${one} / ${other}`] : []));
        })"""
    )
    return found


def cut_off(page: Page) -> list[str]:
    """Words that stick out of the page and cannot be scrolled to."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("h1, h2, h3, p, dt, dd, button, caption, output")]
          .filter((each) => !each.closest("td, th, .sr, #view, .strip") && each.getBoundingClientRect().width > 1)
          .filter((each) => each.getBoundingClientRect().right > window.innerWidth + 1)
          .map((each) => each.textContent.trim().slice(0, 40))"""
    )
    return found


CONTROLS = "a[href], button:enabled, input:enabled, select:enabled, summary, [tabindex='0']"


def missed_by_tab(page: Page) -> list[str]:
    """Controls that the Tab key does not reach, or that something fixed covers when it does."""
    window = "dialog[open]" if page.locator("dialog[open]").count() else "body"
    # Of the points of a chart Tab reaches one, and arrow keys the others.
    controls = page.locator(window).locator(CONTROLS).locator("visible=true")
    count = controls.evaluate_all("all => all.forEach((each, n) => each.setAttribute('data-nth', n)) ?? all.length")
    assert count > 3
    controls.first.focus()  # Tab comes back to it after the last one
    covered: dict[str, str] = {}
    reached = set()
    for _ in range(count + 4):
        page.keyboard.press("Tab")
        at, name, hidden = page.evaluate(
            """() => {
              const each = document.activeElement;
              const box = each.getBoundingClientRect();
              const x = box.left + Math.min(box.width / 2, 20);
              const over = [box.top + 2, box.bottom - 2].map((y) => document.elementFromPoint(x, y));
              const fixed = over.some((top) => top && !top.contains(each) && !each.contains(top) &&
                top.closest("#dial, #bar, thead") && !each.closest("#dial, #bar, thead"));
              return [each.dataset.nth ?? "", each.textContent.trim().slice(0, 40) || each.id, fixed];
            }"""
        )
        reached.add(at)
        if hidden:
            covered[at] = name
    missed = [n for n in range(count) if str(n) not in reached]
    names = controls.evaluate_all("all => all.map((each) => each.textContent.trim().slice(0, 40) || each.id)")
    return [f"not reached: {names[n]}" for n in missed] + [f"covered: {name}" for name in covered.values()]


def mistakes(page: Page) -> list[tuple[str, str, list[str]]]:
    """Contrast, names, roles, landmarks, headings and scrolling by keyboard, as axe-core judges them."""
    return [
        (each["id"], each["impact"], [node["html"][:120] for node in each["nodes"][:3]])
        for each in Axe().run(page).response["violations"]
    ]


@pytest.mark.parametrize("kind", ["report", "single", "images", "served", "docs", "inbox"])
def test_everything_fits_and_can_be_read(browser: Browser, addresses: dict[str, str], val: Samples, kind: str) -> None:
    """At three widths, light and dark. A page is opened once: its window is resized, as by turning a phone."""
    with visited(browser, addresses[kind], width=WIDTHS[0]) as page:
        shown(page, kind, val)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                kept(page, f"{kind}-{width}-{scheme}")
                assert fits(page)
                assert cut_off(page) == []
                if kind != "images":
                    assert covered_labels(page) == []
                else:
                    assert page.locator("#view").bounding_box()["width"] >= min(width - 30, 900)
                assert mistakes(page) == [], (width, scheme)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["report", "images", "served", "docs", "inbox"])
def test_tab_reaches_every_control_in_sight(
    browser: Browser, addresses: dict[str, str], val: Samples, kind: str, width: int
) -> None:
    with visited(browser, addresses[kind], width=width) as page:
        if kind in ("report", "served"):
            page.wait_for_selector("#classes .pick")
            turn(page, 0)  # so that all buttons of the dial are enabled
        shown(page, kind, val)
        assert missed_by_tab(page) == []


def test_print_has_every_section_and_no_controls(browser: Browser, addresses: dict[str, str]) -> None:
    with visited(browser, addresses["report"], width=720) as page:
        turn(page, len(DIAL) - 1)  # forgets many images
        page.emulate_media(media="print")
        kept(page, "report-print")
        assert fits(page)
        assert cut_off(page) == []
        assert covered_labels(page) == []
        assert not page.locator("#dial").is_visible()
        assert page.locator("h2:visible").count() == page.locator("h2").count()
        most = 0
        for gallery in page.locator(".gallery").all():
            images, total = gallery.locator("li").count(), int(gallery.get_attribute("data-total"))
            printed = gallery.locator("li:visible").count()
            assert printed == min(images, 35)
            told = page.locator(f"[data-of={gallery.get_attribute('data-gallery')}]").inner_text()
            assert (f"{printed} are printed" in told) == (printed < total)
            most = max(most, printed)
        assert most > 12  # more than the screen shows at first
        # The tiles have no background of their own that a printer would fill.
        colours = page.locator(".tiles, .tile").evaluate_all(
            "all => all.map((each) => getComputedStyle(each).backgroundColor)"
        )
        assert set(colours) == {"rgba(0, 0, 0, 0)"}
        assert page.pdf()[:5] == b"%PDF-"


def test_columns_out_of_sight_are_hinted_at_and_reached_by_keyboard(
    browser: Browser, addresses: dict[str, str]
) -> None:
    with visited(browser, addresses["report"], width=240) as page:  # a phone with large letters
        until(page, "document.querySelector('.scroll.wide') !== null")
        wide = page.locator(".scroll.wide")
        for box in wide.all():
            assert box.get_attribute("tabindex") == "0"
            assert "scrolls sideways" in box.get_attribute("aria-label")
            hint = box.evaluate("each => getComputedStyle(each, '::before').content")
            assert "Scroll sideways" in hint
            inside = "each => each.querySelector('caption').getBoundingClientRect().right - each.offsetLeft"
            assert box.evaluate(inside) <= box.evaluate("each => each.clientWidth") + 1  # a caption is not cut off
        wide.first.focus()
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('.scroll.wide').scrollLeft > 0")


def test_headings_stay_in_view(browser: Browser, addresses: dict[str, str]) -> None:
    with visited(browser, addresses["report"], width=1400) as page:
        page.set_viewport_size({"width": 1400, "height": 420})
        page.locator("#classes tbody tr").last.evaluate("row => row.scrollIntoView({ block: 'start' })")
        assert page.locator("#classes thead th").first.bounding_box()["y"] >= -1
