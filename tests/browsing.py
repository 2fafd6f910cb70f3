"""A real browser for the pages: found on this machine, driven by Playwright, and watched for what it must not do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from branchout import api
from branchout.data.samples import Samples
from branchout.method.dial import predict
from branchout.method.frontier import Frontier
from branchout.metrics import accuracies

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
else:
    Browser = Page = Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
HERE = ("http://127.0.0.1:", "file:", "data:", "blob:")
"""What an address begins with that does not leave this machine."""


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """The first browser that is here; without one tests are skipped, but never in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        message = f"no browser is installed ({', '.join(NAMES)}); type: apt-get install chromium"
        if os.environ.get("CI") or os.environ.get("BRANCHOUT_CI"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()


@contextmanager
def visited(
    browser: Browser, address: str, *, width: int = 1280, dark: bool = False, forgiven: Sequence[str] = ()
) -> Iterator[Page]:
    """A page that is open. It may complain of nothing but what is forgiven, and ask nobody but this machine."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(30_000)
    page = context.new_page()
    wrong: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    yield page
    context.close()
    assert [line for line in wrong if not any(each in line for each in forgiven)] == []
    assert requests
    assert [url for url in requests if not url.startswith(HERE)] == []


def until(page: Page, condition: str, seconds: float = 30) -> None:
    """Wait for a condition, asked from outside: the pages' own policy forbids what Playwright would do within them."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"it did not come to pass: {condition}"
        page.wait_for_timeout(20)


def fits(page: Page) -> bool:
    """Whether nothing has to be scrolled sideways."""
    answer: bool = page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    return answer


def turn(page: Page, point: int) -> None:
    """Move the dial as a hand does: the slider tells of every place it comes to, and of its rest."""
    page.locator("#at").evaluate(
        """(slider, point) => {
          slider.value = point;
          slider.dispatchEvent(new Event("input", { bubbles: true }));
          slider.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        point,
    )
    # Tables and pictures follow when the browser next draws.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def table(page: Page, selector: str) -> dict[str, list[str]]:
    """The rows of a table by the name they begin with, as they are shown."""
    rows: list[list[str]] = page.locator(f"{selector} tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"
    )
    return {name: cells for name, *cells in rows}


DIAL = (-40.0, -2.0, -0.5, 1.0, 3.0, 40.0)
"""Positions of b far apart: which classes the two ends answer with does not depend on a processor's rounding."""


def with_fixed_dial(model: api.Model, samples: Samples, folder: Path) -> api.Model:
    """The model with a frontier at the positions of `DIAL`, measured on `samples` and saved at the balanced point.

    The frontier of a trained test model has few points, and which ones depends on the processor.
    """
    found = model.evaluate(samples)
    measured = [accuracies(predict(found.columns, found.space, b), found.labels, found.space) for b in DIAL]
    figures = {
        name: np.array([np.nan if getattr(each, name) is None else getattr(each, name) for each in measured])
        for name in ("all", "base", "novel", "overlap", "avg")
    }
    frontier = Frontier("dial", np.array(DIAL)[:, None], figures, len(samples))
    point = frontier.choose("balanced")
    assert 0 < point < len(DIAL) - 1
    *earlier, last = model.saved.step_points
    points = replace(last, frontier=frontier.to_dict(), point=point, goal="balanced")
    # What `extend` measured belongs to points of the frontier that is replaced.
    history = tuple({k: v for k, v in event.items() if k != "measured"} for event in model.saved.history)
    saved = replace(model.saved, step_points=(*earlier, points), history=history)
    return api.Model(saved, None, model.device).save(folder)
