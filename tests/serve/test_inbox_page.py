"""The inbox in a real browser: from ten photos of two unknown classes to a model that knows both, with keys."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Browser, Page, fits, until, visited
from fastapi import FastAPI
from inbox_case import UNKNOWN_GLYPHS, Case, check_taught, make_with_glyphs, write
from serving import Caller, running

from branchout import api
from branchout.data.samples import Samples
from branchout.inbox.folder import Inbox
from branchout.serve.app import create_app
from branchout.serve.inbox import InboxSettings


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Samples]:
    return make_with_glyphs(tmp_path_factory.mktemp("inbox"))


@pytest.fixture
def case(drawn: tuple[Case, Samples], tmp_path: Path) -> Case:
    made = drawn[0]
    return Case(shutil.copytree(made.root, tmp_path / "all"), tmp_path / "all" / "v1", made.truth)


@pytest.fixture
def app(case: Case) -> FastAPI:
    return create_app(api.load(case.model), inbox=InboxSettings(case.photos, case.old))


@pytest.fixture
def server(app: FastAPI) -> Iterator[Caller]:
    with running(app) as caller:
        yield caller


@pytest.fixture
def val_file(drawn: tuple[Case, Samples], tmp_path: Path) -> Path:
    """Another photo of the first unknown class."""
    return tmp_path / write(drawn[1], UNKNOWN_GLYPHS[0], 1, tmp_path)[0]


def address(server: Caller) -> str:
    return f"http://127.0.0.1:{server.port}/inbox"


def opened(page: Page) -> None:
    until(page, "document.querySelectorAll('#groups .photo, #fits .photo').length === 10", 60)


def files(page: Page, where: str) -> list[str]:
    found: list[str] = page.locator(f"{where} .photo").evaluate_all("all => all.map((each) => each.title)")
    return found


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def send(page: Page, file: str, name: str) -> None:
    page.locator(f'.photo[title="{file}"]').focus()
    press(page, "Enter")
    page.keyboard.type(name)
    press(page, "Enter")


def name_everything(page: Page, case: Case) -> None:
    """Each group by the class that most of its photos have; first, one by one, the photos that are elsewhere."""
    while left := page.locator("#groups .photo, #fits .photo").count():
        if page.locator("#groups .group").count():
            shown = files(page, "#groups .group:first-child")
            name = Counter(case.truth[file] for file in shown).most_common(1)[0][0]
            single = [file for file in shown if case.truth[file] != name]
        else:
            shown = single = files(page, "#fits")
        if single:
            send(page, single[0], case.truth[single[0]])
            shown = single[:1]
        else:
            page.locator("#groups .photo").first.focus()
            page.keyboard.type(name)  # goes to the field of the group
            press(page, "Enter")
        until(page, f"document.querySelectorAll('#groups .photo, #fits .photo').length === {left - len(shown)}")


def test_from_ten_photos_to_a_model_that_knows_both_classes(
    browser: Browser, server: Caller, case: Case, drawn: tuple[Case, Samples]
) -> None:
    with visited(browser, address(server)) as page:
        opened(page)
        assert page.locator("#groups .photo").count() >= 5  # most are found to be unknown
        name_everything(page, case)
        assert page.locator("#classes-named .group").count() == 2
        decided = Inbox(case.photos).decisions().values()
        assert {each.file: each.name for each in decided} == case.truth
        assert "2 classes (10 photos)" in page.locator("#teach").inner_text()
        press(page, "Control+Enter")
        until(page, "document.getElementById('run').dataset.state === 'running'")
    with visited(browser, address(server)) as page:  # the page was closed meanwhile
        until(page, "document.getElementById('run').dataset.state === 'finished'", 180)
        said = page.locator("#result").inner_text()
        assert "of the 10 photos are classified correctly" in said
        assert "worse" in said  # got worse, or did not
        heads = page.locator("#result tbody th").all_inner_texts()
        assert heads == ["base classes", f"new classes: {', '.join(sorted(UNKNOWN_GLYPHS))}"]
        page.get_by_role("button", name="Use this model").click()
        until(page, "document.getElementById('run').hidden", 30)
        assert "v2 is served now" in page.locator("#summary").inner_text()
    model = api.load(case.root / "v2")
    assert set(UNKNOWN_GLYPHS) < set(model.classes)
    assert len(server.get("/model").json["classes"]) == len(model.classes)
    check_taught(model, drawn[1])


def test_keys_move_dismiss_and_undo(browser: Browser, server: Caller, case: Case) -> None:
    with visited(browser, address(server)) as page:
        opened(page)
        order = files(page, "#groups")
        focused = "document.activeElement.title"
        press(page, "ArrowRight")
        assert page.evaluate(focused) == order[0]
        press(page, "ArrowRight")
        assert page.evaluate(focused) == order[1]
        press(page, "ArrowDown", "ArrowUp")
        assert page.evaluate(focused) == order[0]
        press(page, "Delete")
        until(page, "document.querySelectorAll('#dismissed .photo').length === 1")
        until(page, f"document.activeElement.title === '{order[1]}'")
        press(page, "Control+z")
        until(page, "document.querySelectorAll('#dismissed .photo').length === 0")
        page.locator("#groups .photo").first.focus()
        count = len(files(page, "#groups .group:first-child"))
        press(page, "Shift+Delete")
        until(page, f"document.querySelectorAll('#dismissed .photo').length === {count}")
        page.locator("#groups .photo, #fits .photo").first.focus()
        press(page, "Enter")
        assert page.evaluate("document.getElementById('send').open")
        press(page, "Escape")
        assert not page.evaluate("document.getElementById('send').open")
    assert len(Inbox(case.photos).decisions()) == count


def test_letters_only_ever_begin_a_name(browser: Browser, server: Caller, case: Case, val_file: Path) -> None:
    with visited(browser, address(server)) as page:
        opened(page)
        page.keyboard.type("nsxutnX")  # nothing has the focus
        assert not page.evaluate("document.getElementById('send').open")
        page.locator("#groups .photo").first.focus()
        page.keyboard.type("tux")
        field = page.locator("#groups input").first
        assert field.input_value() == "tux"
        shown = page.locator("#groups .photo, #fits .photo").count()
        shutil.copy(val_file, case.photos / "later.png")  # the page is drawn again while a name is being typed
        until(page, f"document.querySelectorAll('#groups .photo, #fits .photo').length === {shown + 1}")
        page.keyboard.type("edo sun")
        assert "tuxedo sun" in page.locator("#groups input").evaluate_all("all => all.map((each) => each.value)")
        assert Inbox(case.photos).decisions() == {}
        assert page.evaluate("document.getElementById('run').hidden")


def test_a_similar_name_is_asked_about_and_undo_outlives_the_page(browser: Browser, server: Caller, case: Case) -> None:
    known = api.load(case.model).classes[0]
    with visited(browser, address(server), forgiven=["409"]) as page:
        opened(page)
        count = len(files(page, "#groups .group:first-child"))
        page.locator("#groups input").first.fill(known.upper())
        press(page, "Enter")
        until(page, "document.getElementById('similar').open")
        assert known in page.locator("#similar-text").inner_text()
        page.get_by_role("button", name=f"Use {known}").click()
        until(page, "document.querySelectorAll('#classes-named .group').length === 1")
        assert {each.name for each in Inbox(case.photos).decisions().values()} == {known}
    with visited(browser, address(server)) as page:
        opened_again = f"document.querySelectorAll('#classes-named .photo').length === {count}"
        until(page, opened_again, 60)
        page.get_by_role("button", name=f"named {known}").click()
        until(page, "document.querySelectorAll('#classes-named .photo').length === 0")
    assert Inbox(case.photos).decisions() == {}


def test_it_is_said_before_teaching_that_no_old_images_are_kept(browser: Browser, case: Case) -> None:
    inbox = Inbox(case.photos)
    inbox.decide(inbox.photos()[:3], "robin")
    app = create_app(api.load(case.model), inbox=InboxSettings(case.photos, threshold=-100.0))
    with running(app) as server, visited(browser, address(server)) as page:
        until(page, "!document.getElementById('bar').hidden && state.notes.length > 0", 60)
        page.locator("#teach").click()
        assert "--memory OLD/" in page.locator("#before").inner_text()
        page.get_by_role("button", name="Cancel").click()
        assert page.evaluate("document.getElementById('run').hidden")


def test_a_tab_is_told_of_a_model_that_went_live_elsewhere(browser: Browser, server: Caller, app: FastAPI) -> None:
    with visited(browser, address(server)) as page:
        opened(page)
        app.state.service.report.model_path = "elsewhere/v7"
        until(page, "document.getElementById('summary').textContent.includes('v7 is served now')")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (768, True), (1400, False)])
def test_it_fits_every_width_and_pictures_load(browser: Browser, server: Caller, width: int, dark: bool) -> None:
    with visited(browser, address(server), width=width, dark=dark) as page:
        opened(page)
        assert fits(page)
        until(page, "[...document.querySelectorAll('#groups img')].slice(0, 2).every((each) => each.naturalWidth > 0)")
        assert page.evaluate("[...document.querySelectorAll('input')].every((each) => each.labels.length)")


def test_a_name_that_cannot_be_a_folder_is_explained_and_nothing_is_lost(
    browser: Browser, server: Caller, case: Case
) -> None:
    with visited(browser, address(server), forgiven=["422"]) as page:
        opened(page)
        page.locator("#groups input").first.fill("../up")
        press(page, "Enter")
        until(page, "!document.getElementById('message').hidden")
        assert "slash" in page.locator("#message").inner_text()
        assert len(files(page, "#groups")) + len(files(page, "#fits")) == 10


def test_false_alarms_are_chosen_and_a_photo_is_dismissed_without_keys(
    browser: Browser, server: Caller, case: Case
) -> None:
    with visited(browser, address(server), width=390) as page:
        opened(page)
        page.select_option("#share", "0.5")
        until(page, "document.getElementById('unknown-note').textContent.includes('50% of 100 known images')")
        page.locator("#groups .photo").first.click()
        page.get_by_role("dialog").get_by_role("button", name="Dismiss").click()
        until(page, "document.querySelectorAll('#dismissed .photo').length === 1")
    assert Inbox(case.photos).false_alarms == 0.5
    assert [each.name for each in Inbox(case.photos).decisions().values()] == [None]
