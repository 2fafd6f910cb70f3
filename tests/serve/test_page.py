"""The live page in a real browser: pictures are answered, the dial moves everything, classes and runs are watched."""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from browsing import Browser, Page, fits, table, turn, until, visited, with_fixed_dial
from helpers import BASE, LATER, NEW, untrained
from serving import Caller, File, png, running

from branchout import api
from branchout.data.samples import ArrayPixels, Image, Samples
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.serve.app import create_app
from branchout.units import percent


@pytest.fixture(scope="module")
def adjustable(extended: api.Model, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    """The extended model with a dial whose positions are the same on every machine."""
    return with_fixed_dial(extended, val.of_classes(extended.classes), tmp_path_factory.mktemp("dial") / "v2")


@pytest.fixture(scope="module")
def tested(adjustable: api.Model, val: Samples) -> Samples:
    return val.of_classes(adjustable.classes)


@pytest.fixture(scope="module")
def server(adjustable: api.Model, tested: Samples) -> Iterator[Caller]:
    with running(create_app(adjustable, test=tested)) as caller:
        yield caller


@pytest.fixture
def copied(adjustable: api.Model, tmp_path: Path) -> api.Model:
    """A model whose folder may be written to."""
    assert adjustable.folder is not None
    return api.load(shutil.copytree(adjustable.folder, tmp_path / "v2"))


def address(server: Caller) -> str:
    return f"http://127.0.0.1:{server.port}/"


def file_of(samples: Samples, name: str) -> File:
    row = int(np.flatnonzero(samples.names == name)[0])
    return f"{name}.png", png(samples.read(row))


def given(page: Page, files: list[File], how: str = "drop") -> None:
    """Files that come by a drop, or by a paste."""
    page.evaluate(
        """([files, how]) => {
          const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
          const held = new DataTransfer();
          for (const [name, data] of files) held.items.add(new File([bytes(data)], name, { type: "image/png" }));
          const event = how === "drop" ? new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: held })
            : new ClipboardEvent("paste", { bubbles: true, clipboardData: held });
          document.getElementById("drop").dispatchEvent(event);
        }""",
        [[(name, base64.b64encode(data).decode()) for name, data in files], how],
    )


def answers(page: Page, number: int = 0) -> list[tuple[str, str]]:
    """Names and probabilities that a card shows."""
    card = page.locator("#answers > li").nth(number)
    names = card.locator(".top li bdi").all_text_contents()
    return list(zip(names, card.locator(".top .number").all_text_contents(), strict=True))


def expected(model: api.Model, picture: Image) -> list[tuple[str, str]]:
    return [(name, f"{100 * chance:.1f}%") for name, chance in model.predict(picture)]


def close(shown: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> bool:
    """The same names in the same order, and the same numbers but for the last digit's rounding."""
    apart = [abs(float(a[:-1]) - float(b[:-1])) for (_, a), (_, b) in zip(shown, wanted, strict=True)]
    return [name for name, _ in shown] == [name for name, _ in wanted] and max(apart) < 0.11


def at(model: api.Model, place: int) -> api.Model:
    """The model at a place of the dial, as `tune` would leave it."""
    number = int(np.argsort(model.frontier.settings[:, 0], kind="stable")[place])
    *earlier, last = model.saved.step_points
    return api.Model(replace(model.saved, step_points=(*earlier, replace(last, point=number))), None)


def ready(page: Page) -> None:
    """Once the labelled images are in the page."""
    page.wait_for_selector("#forgotten")
    page.wait_for_selector("#classes .pick")
    page.wait_for_selector("#apply", state="attached")


# Pictures.


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_pictures_are_answered_beside_what_was_said_before(
    browser: Browser, server: Caller, adjustable: api.Model, base: api.Model, tested: Samples, how: str
) -> None:
    chosen = [NEW[0], BASE[2]]
    with visited(browser, address(server)) as page:
        ready(page)
        given(page, [file_of(tested, name) for name in chosen], how)
        until(page, "document.querySelectorAll('.top').length === 2")
        for number, name in enumerate(chosen):
            picture = tested.read(int(np.flatnonzero(tested.names == name)[0]))
            assert close(answers(page, number), expected(adjustable, picture))
            card = page.locator("#answers > li").nth(number)
            marks = card.locator(".top .mark").all_text_contents()
            assert marks == ["new" if each in NEW else "base" for each, _ in answers(page, number)]
            (earlier, chance), *_ = base.predict(picture)
            assert card.locator(".before").text_content().startswith(f"{earlier} {100 * chance:.1f}%")
            shares = re.findall(r"(base|step 1) ([\d.]+)%", card.locator(".facts-of-answer").text_content())
            assert [branch for branch, _ in shares] == ["base", "step 1"]
            assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.11)
            assert card.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
            assert card.locator(".file").text_content() == f"{name}.png"
        page.click("#clear")
        assert page.locator("#answers > li").count() == 0


def test_marks_tell_every_step_apart(browser: Browser, extended_twice: api.Model, val: Samples) -> None:
    space = extended_twice.classifier.space
    with running(create_app(extended_twice)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#names tr")
        given(page, [file_of(val, name) for name in (BASE[0], BASE[3], NEW[0], NEW[1], LATER[0])])
        until(page, "document.querySelectorAll('.top').length === 5")
        lines = page.locator(".top li").evaluate_all(
            "all => all.map((line) => ['bdi', '.mark'].map((part) => line.querySelector(part).textContent))"
        )
        assert {mark for _, mark in lines} == {"base", "step 1", "overlap", "new"}
        for name, mark in lines:
            known = [number for number, names in enumerate(space.branches) if name in names]
            wanted = "overlap" if len(known) > 1 else {0: "base", 1: "step 1", 2: "new"}[known[0]]
            assert mark == wanted, name


def test_many_pictures_are_chosen_at_once(browser: Browser, server: Caller, tested: Samples, tmp_path: Path) -> None:
    count = 20  # more than one request holds
    for n in range(count):
        (tmp_path / f"{n:02}.png").write_bytes(png(tested.read(n)))
    with visited(browser, address(server)) as page:
        page.wait_for_selector("#dial")
        page.set_input_files("#files", sorted(tmp_path.iterdir()))
        until(page, f"document.querySelectorAll('.top').length === {count}")
        names = page.locator("#answers .file").all_text_contents()
        assert names == [f"{n:02}.png" for n in range(count)]


def test_a_bad_file_gets_the_servers_sentence(browser: Browser, server: Caller, tested: Samples) -> None:
    bad = ("notes.png", b"these are words")
    sentence = server.predict([bad]).json["error"]
    with visited(browser, address(server), forgiven=["status of 415"]) as page:
        page.wait_for_selector("#dial")
        given(page, [file_of(tested, NEW[1]), bad])
        page.wait_for_selector(".top")
        assert page.locator("#answers > li").nth(1).locator(".warn").text_content() == f"✗ {sentence}"
        assert page.locator("#answers > li").nth(1).locator(".none").text_content() == "no preview"
        given(page, [bad])
        until(page, "document.querySelectorAll('#answers > li').length === 3")
        page.wait_for_selector("#answers > li:first-child .warn")
        assert page.locator("#answers > li").nth(0).locator(".warn").text_content() == f"✗ {sentence}"


# The dial.


def test_everything_follows_the_dial_and_agrees_with_python(
    browser: Browser, server: Caller, adjustable: api.Model, tested: Samples
) -> None:
    last = len(adjustable.frontier) - 1
    picture = tested.read(int(np.flatnonzero(tested.names == NEW[0])[0]))
    seen = set()
    with visited(browser, address(server)) as page:
        ready(page)
        given(page, [file_of(tested, NEW[0])])
        page.wait_for_selector(".top")
        for place in (0, last):
            with page.expect_response(re.compile("/predict")):
                turn(page, place)
            model = at(adjustable, place)
            found = model.evaluate(tested)
            tiles = page.locator(".tile dd b").all_text_contents()
            assert tiles[:2] == [percent(found.after.base), percent(found.after.novel)]
            rows = table(page, "#classes")
            for row in found.classes():
                assert rows[row.name][2] == f"{round(8 * row.after)}/8"
            until(page, "!document.querySelector('#answers.waiting')")
            assert close(answers(page), expected(model, picture))
            seen.add((tuple(tiles), tuple(answers(page))))
        assert server.get("/operating-point").json["operating_point"]["saved"]  # looking moves nobody else
    assert len(seen) == 2


def test_apply_saves_the_point_in_the_model(browser: Browser, copied: api.Model, tested: Samples) -> None:
    assert copied.folder is not None
    place = 0 if copied.saved.step_points[-1].point else len(copied.frontier) - 1
    with running(create_app(copied, test=tested)) as server:
        with visited(browser, address(server)) as page:
            ready(page)
            assert page.locator("#apply").is_disabled()
            turn(page, place)
            page.click("#apply")
            until(page, "document.getElementById('told').textContent.startsWith('Saved')")
            assert page.locator("#apply").is_disabled()
            assert page.locator("#moved").is_hidden()
            kept = api.load(copied.folder)
            assert kept.saved.step_points[-1].point == place
            assert page.locator("tr", has_text="◂ saved").count() == 2
            goal, tune = kept.saved.step_points[-1].goal, page.locator("#tune")
            if goal.startswith("b="):  # no goal of `branchout tune` chooses this point
                assert tune.is_hidden()
            else:
                assert tune.locator("code").text_content().endswith(f" --goal {shlex.quote(goal)}")
        with visited(browser, address(server)) as page:
            page.wait_for_selector("#apply")
            assert page.input_value("#at") == str(place)
    assert kept.evaluate(tested).after == at(copied, place).evaluate(tested).after


def test_saving_is_undone(browser: Browser, copied: api.Model) -> None:
    assert copied.folder is not None
    earlier = copied.saved.step_points[-1].point
    with running(create_app(copied)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#apply")
        turn(page, 0)
        page.click("#apply")
        page.get_by_role("button", name="Undo saving").click()
        until(page, f"document.getElementById('at').value === '{earlier}'")
        until(page, "document.getElementById('told').textContent.startsWith('Saved')")
        assert page.get_by_role("button", name="Undo saving").count() == 0
    assert api.load(copied.folder).saved.step_points[-1].point == earlier


def test_a_tab_is_told_of_a_point_saved_by_another_program(browser: Browser, copied: api.Model) -> None:
    earlier = copied.saved.step_points[-1].point
    goal = next(goal for goal in ("novel", "all") if copied.frontier.choose(goal) != earlier)
    with running(create_app(copied)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#apply")
        assert page.locator("#news").is_hidden()
        api.load(copied.folder).tune(goal)
        page.wait_for_selector("#news:visible")
        assert "operating point was saved" in page.locator("#news").text_content()
        page.get_by_role("button", name="Use it").click()
        until(page, f"document.getElementById('at').value === '{copied.frontier.choose(goal)}'")
        assert page.locator("#news").is_hidden()
        assert server.get("/operating-point").json["operating_point"]["saved"]


def test_a_tab_is_told_of_another_model(
    browser: Browser, copied: api.Model, extended_twice: api.Model, tested: Samples
) -> None:
    app = create_app(copied)
    with running(app) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#apply")
        given(page, [file_of(tested, NEW[0])])
        page.wait_for_selector(".top")
        app.state.service.replace(extended_twice)
        page.wait_for_selector("#news:visible")
        assert f"now serves {extended_twice.folder.name}" in page.locator("#news").text_content()
        assert page.locator("#names tr").count() == 11
        page.get_by_role("button", name="Show it").click()
        until(page, "document.querySelectorAll('#names tr').length === 14")
        assert page.locator("#news").is_hidden()
        assert page.locator("#answers > li").count() == 1  # the photo stays, and is answered by the other model
        until(page, "document.querySelectorAll('.facts-of-answer dd div div').length === 3")


def test_a_tab_is_told_that_the_folder_holds_another_model(
    browser: Browser, copied: api.Model, extended_twice: api.Model
) -> None:
    with running(create_app(copied)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#apply")
        shutil.rmtree(copied.folder)
        shutil.copytree(extended_twice.folder, copied.folder)
        page.wait_for_selector("#news:visible")
        assert "Restart the server" in page.locator("#news").text_content()


def test_the_first_thing_drawn_is_not_empty(server: Caller, adjustable: api.Model) -> None:
    first = server.get("/").body.decode()
    assert re.search(r"<h1>.*knows 3 more classes", first, re.DOTALL)
    assert 'class="tiles"' in first
    with running(create_app(None, watch=Path("v9"))) as waiting:
        first = waiting.get("/").body.decode()
    assert "Waiting for v9" in first
    assert re.search(r'<section id="ask"[^>]* hidden', first)


def test_what_cannot_be_saved_is_said(browser: Browser, adjustable: api.Model) -> None:
    model = api.Model(adjustable.saved, None)
    with (
        running(create_app(model)) as server,
        visited(browser, address(server), forgiven=["status of 422"]) as page,
    ):
        page.wait_for_selector("#apply")
        turn(page, 0)
        page.click("#apply")
        page.wait_for_selector("#message:visible")
        assert "folder" in page.locator("#message").text_content()
        assert not page.locator("#apply").is_disabled()


# Classes.


def test_a_class_is_found_and_its_pictures_are_seen(
    browser: Browser, server: Caller, adjustable: api.Model, tested: Samples
) -> None:
    name = "greek capital letter omega"
    number = adjustable.classes.index(name)
    with visited(browser, address(server)) as page:
        ready(page)
        page.get_by_role("searchbox").fill("Omega")
        assert page.locator("#classes tbody tr:visible").count() == 1
        for _ in range(10):  # past the headings, by which the table is sorted
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.className") == "pick":
                break
        page.keyboard.press("Enter")
        assert page.locator("#view-title").text_content() == f"8 images of “{name}”"
        widths = page.locator("#view .strip img").evaluate_all(
            "all => Promise.all(all.map((image) => image.decode().then(() => image.naturalWidth)))"
        )
        assert widths == [32] * 8
        found = adjustable.evaluate(tested)
        wrong = int(((found.answers != number) & (found.labels == number)).sum())
        assert page.locator("#view .mistaken").count() == wrong
        page.get_by_role("button", name="Close").click()
        assert not page.locator("#view").is_visible()


def test_a_mistake_is_explained_where_it_is_seen(
    browser: Browser, server: Caller, adjustable: api.Model, tested: Samples
) -> None:
    found = adjustable.evaluate(tested)
    row = int(np.flatnonzero(found.answers != found.labels)[0])
    name = adjustable.classes[found.labels[row]]
    why = adjustable.explain(tested.read(row), expect=name)
    link = f"{address(server)}#images?{urlencode({'class': name, 'image': row})}"
    with visited(browser, link) as page:
        page.wait_for_selector("#view .why")
        assert page.locator("#view .why h4").text_content() == f"Why not {name}?"
        logits = page.locator("#view .why tbody tr td:last-child").all_text_contents()
        shown = [float(each.replace("\N{MINUS SIGN}", "-")) for each in logits]
        assert shown == pytest.approx([why.winner.logit, why.expected.score.logit], abs=0.02)
        assert f"ranked {why.expected.place}" in page.locator("#view .why").text_content()
        assert "base" in page.locator("#view .said").text_content()


def test_why_not_is_asked_about_another_class_in_the_window(
    browser: Browser, server: Caller, adjustable: api.Model, tested: Samples
) -> None:
    found = adjustable.evaluate(tested)
    row = int(np.flatnonzero(found.answers == found.labels)[0])
    name = adjustable.classes[found.labels[row]]
    other = next(each for each in adjustable.classes if each != name)
    why = adjustable.explain(tested.read(row), expect=other).expected
    link = f"{address(server)}#images?{urlencode({'class': name, 'image': row})}"
    with visited(browser, link) as page:
        field = page.locator("#view").get_by_label("Why not")
        field.fill(other)
        page.keyboard.press("Enter")
        page.wait_for_selector("#view .why")
        assert f"is ranked {why.place}" in page.locator("#view .why").text_content()
        link = page.url
    with visited(browser, link) as page:
        page.wait_for_selector("#view .why")
        assert page.locator("#view .why h4").text_content() == f"Why not {other}?"


def test_why_not_is_asked_about_an_uploaded_image(
    browser: Browser, server: Caller, adjustable: api.Model, tested: Samples
) -> None:
    picture = tested.read(int(np.flatnonzero(tested.names == NEW[0])[0]))
    why = adjustable.explain(picture, expect=BASE[3]).expected
    with visited(browser, address(server), forgiven=["status of 422"]) as page:
        ready(page)
        given(page, [file_of(tested, NEW[0])])
        page.wait_for_selector(".top")
        until(page, "document.getElementById('live').textContent.includes('before')")  # what a screen reader says
        assert answers(page)[0][0] in page.locator("#live").text_content()
        page.get_by_label("Why not").fill(BASE[3])
        page.get_by_role("button", name="Show why").click()
        page.wait_for_selector("#answers .why")
        told = page.locator("#answers .why").text_content()
        assert f"is ranked {why.place}" in told
        page.get_by_label("Why not").fill(BASE[3][:-2])
        page.keyboard.press("Enter")
        page.wait_for_selector("#answers .warn")
        assert BASE[3] in page.locator("#answers .warn").text_content()  # a similar name


def test_without_labelled_images_names_are_searched(browser: Browser, adjustable: api.Model) -> None:
    with running(create_app(adjustable)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#names tr")
        assert page.locator("#names tr").count() == 11
        page.get_by_role("searchbox").fill("ARROW")
        until(page, "document.querySelectorAll('#names tr').length === 1")
        assert page.locator("#names tr").text_content() == "upwards arrow newstep 1"
        assert page.locator("#found").text_content() == "1 class"
        assert "find=ARROW" in page.url
        page.get_by_role("searchbox").fill("zebra")
        until(page, "document.querySelector('#browse .matches').textContent.includes('No class matches “zebra”')")
        page.get_by_role("button", name="Clear the search").click()
        until(page, "document.querySelectorAll('#names tr').length === 11")
        assert "find" not in page.url
        turn(page, 0)
        assert page.locator("tr.live:visible").count() == 1


class Gated:
    """Pictures that nobody can read before the gate is open."""

    def __init__(self, images: np.ndarray) -> None:
        self.inner = ArrayPixels(images)
        self.gate = threading.Event()
        self.shape = None

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, row: int) -> Image:
        assert self.gate.wait(20)
        return self.inner.read(row)

    def fingerprint(self, rows: np.ndarray, *, portable: bool = False) -> str:
        return self.inner.fingerprint(rows, portable=portable)


def test_the_page_is_there_before_the_images_are_read(browser: Browser, adjustable: api.Model, tested: Samples) -> None:
    pixels = Gated(np.stack([tested.read(n) for n in range(20)]) // 2)  # unlike any that a cache may hold
    samples = Samples.build(pixels, tested.names[:20], [f"dark/{n}" for n in range(20)])
    with running(create_app(adjustable, test=samples)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#dial")
        assert "Reading the labelled images" in page.locator("#reading").text_content()
        given(page, [file_of(tested, NEW[0])])
        page.wait_for_selector(".top")
        turn(page, 0)
        pixels.gate.set()
        ready(page)
        assert page.locator("#reading").is_hidden()
        assert page.input_value("#at") == "0"  # the dial stays where it was put
        assert "Accuracy on 20 labelled images" in page.locator("#figures").text_content()


# Names are harmless.


def test_names_are_only_ever_text(browser: Browser, tmp_path: Path) -> None:
    evil = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "a", '"><b>', "b", "&amp;"]
    figures = {name: [0.4, 0.6] for name in ("all", "base", "novel", "avg")} | {"overlap": [None, None]}
    frontier = {"kind": "dial", "settings": [[-1.0], [1.0]], "figures": figures, "images": 6, "balanced_by": "mean"}
    points = StepPoints({**frontier, "measured": "dev"}, [], 0, "all")
    model = api.Model(SavedModel(untrained(evil[:3], evil[3:]), (points,), ({}, {})), None)
    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 1), dtype=np.uint8)
    samples = Samples.build(ArrayPixels(pixels), evil * 2, [f"{n}" for n in range(12)])
    with running(create_app(model, test=samples)) as server, visited(browser, address(server)) as page:
        ready(page)
        given(page, [("<i>name.png", png(pixels[0]))])
        page.wait_for_selector(".top")
        shown = page.locator(".top bdi").all_text_contents()
        assert set(shown) <= set(evil)
        assert len(shown) == 5
        turn(page, 1)
        page.locator("#classes .pick").first.click()
        assert page.locator("script").count() == 2
        assert page.locator("[onerror], #report b").count() == 0
        assert set(table(page, "#classes")) == set(evil)


# Watching.


def test_a_running_extension_is_watched_until_it_answers(
    browser: Browser, adjustable: api.Model, tested: Samples, tmp_path: Path
) -> None:
    out = tmp_path / "v3"
    work = api.work_folder(out)
    work.mkdir()

    def note(*works: dict[str, Any]) -> None:
        here = {"state": "running", "pid": os.getpid(), "host": platform.node(), "started": 1.0, "updated": time.time()}
        (work / "partial").write_text(json.dumps({**here, "works": works}), encoding="utf-8")
        (work / "partial").replace(work / "progress.json")

    def trained(losses: list[float]) -> dict[str, Any]:
        figures = {"loss": losses[-1]}
        return {"work": "branch", "done": len(losses), "total": 4, "figures": figures, "losses": losses, "since": 1.0}

    note(trained([2.5]))
    with running(create_app(None, watch=out, test=tested)) as server, visited(browser, address(server)) as page:
        page.wait_for_selector("#works progress")
        assert page.locator("#ask").is_hidden()
        assert page.locator("#works progress").evaluate("bar => bar.value / bar.max") == 0.25
        note(trained([2.5, 1.25, float("nan"), 0.5]))
        until(page, "document.querySelector('#works').textContent.includes('4 of 4')")
        assert page.locator("#losses svg").get_attribute("aria-label") == (
            "loss 2.500 in the first epoch, 0.500 in epoch 4 of 4"
        )
        assert len(page.locator("#losses polyline").get_attribute("points").split()) == 3
        shutil.copytree(adjustable.folder, tmp_path / "copy")
        (tmp_path / "copy").rename(out)
        shutil.rmtree(work)
        ready(page)
        until(page, "document.getElementById('state').textContent === 'Finished.'")
        given(page, [file_of(tested, NEW[0])])
        page.wait_for_selector(".top")


# Readers of every kind.


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, server: Caller, tested: Samples, dark: bool) -> None:
    with visited(browser, address(server), width=390, dark=dark) as page:
        ready(page)
        given(page, [file_of(tested, NEW[0]), ("a" * 100 + ".png", b"words")])
        page.wait_for_selector(".top")
        turn(page, 0)
        assert fits(page)
        assert page.locator("#drop").bounding_box()["y"] < page.locator("h1").bounding_box()["y"]
        assert page.locator("#apply").bounding_box()["x"] + page.locator("#apply").bounding_box()["width"] <= 390


def test_every_control_is_reached_by_keyboard_and_has_a_name(browser: Browser, server: Caller) -> None:
    with visited(browser, address(server)) as page:
        ready(page)
        nameless = page.locator("button, input, select, a, progress").evaluate_all(
            "all => all.filter((each) => !(each.textContent.trim() || each.labels?.length || each.ariaLabel"
            " || each.querySelector('img')?.alt)).length"
        )
        assert nameless == 0
        turn(page, 0)
        reached = set()
        for _ in range(120):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('class')"))
            reached.add(page.evaluate("document.activeElement.closest('.plot g') ? 'a point of the chart' : ''"))
        assert {"files", "at", "apply", "pick", "go", "chip", "undo", "a point of the chart"} <= reached
        page.focus("#at")
        before = page.locator(".tile dd b").all_text_contents()
        page.keyboard.press("End")
        assert page.locator(".tile dd b").all_text_contents() != before


def test_the_documentation_is_a_page_too(browser: Browser, server: Caller) -> None:
    with visited(browser, f"{address(server)}docs", width=390) as page:
        assert page.locator("h2").count() > 8
        assert fits(page)
