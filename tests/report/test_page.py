"""The report as a page: what it says, what it must not do, and how the command answers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import BASE, NEW, exemplars, run, untrained
from PIL import Image

from branchout import api
from branchout.data.samples import ArrayPixels, Samples
from branchout.errors import BranchoutError, printable
from branchout.goals import METRICS
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.report.counts import counts_at
from branchout.report.data import ReportData
from branchout.report.page import render
from branchout.units import change, percent

VOID = {"meta", "img", "input", "br", "link", "hr"}


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str | None]
    within: tuple[str, ...]


class Page(HTMLParser):
    """A page taken apart; tags that are not closed in order are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[Element] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    @property
    def shown(self) -> str:
        """What a reader sees, without scripts and styles."""
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(next(text for tag, text in self.texts if tag == "script"))
        return found


@pytest.fixture(scope="module")
def once(extended: api.Model, val: Samples) -> ReportData:
    return extended.report_data(val.of_classes(extended.classes), gallery=4, model_path="models/v2")


@pytest.fixture(scope="module")
def twice(extended_twice: api.Model, val: Samples) -> ReportData:
    return extended_twice.report_data(val, gallery=4)


@pytest.fixture(scope="module")
def pages(once: ReportData, twice: ReportData, base: api.Model, extended: api.Model, val: Samples) -> dict[str, str]:
    return {
        "once": render(once),
        "twice": render(twice),
        "without images": render(extended.report_data(model_path="models/v2")),
        "base": render(base.report_data()),
        "base with images": render(base.report_data(val.of_classes(BASE))),
    }


# What it says.


def test_its_numbers_are_those_of_evaluate(pages: dict[str, str], extended: api.Model, val: Samples) -> None:
    shown = Page(pages["once"]).shown
    found = extended.evaluate(val.of_classes(extended.classes))
    assert found.before is not None
    assert f"base {METRICS['base'].meaning} {percent(found.after.base)} % {percent(found.before.base)} before" in shown
    assert f"novel {METRICS['novel'].meaning} {percent(found.after.novel)} %" in shown
    for row in found.classes():
        words = f"{row.name} {'step 1' if row.before is None else 'base'}"
        earlier = "" if row.before is None else f" {round(8 * row.before)}/8"
        assert f"{words}{earlier} {round(8 * row.after)}/8" in shown
    right = int((found.answers == found.labels)[np.isin(found.labels, range(len(BASE)))].sum())
    assert f"base {8 * len(BASE)} {right} ( {percent(found.after.base)} %)" in shown
    assert "Accuracy on 88 labelled images given for this report." in shown


def test_every_part_of_the_story_is_there(pages: dict[str, str]) -> None:
    titles = ["Operating points", "Forgotten", "Gained", "Accuracy per class", "Confusion between old and new classes",
              "What was added", "Training", "Sizes and times"]  # fmt: skip
    for name in ("once", "twice"):
        found = [text for tag, text in Page(pages[name]).texts if tag == "h2"]
        assert [title for title in found if not title.startswith("Overlapping")] == titles
    assert "Overlapping classes: which branch answers" in Page(pages["twice"]).shown
    assert "Overlapping" not in Page(pages["once"]).shown


def test_the_title_says_what_happened(
    pages: dict[str, str], once: ReportData, base: api.Model, extended: api.Model
) -> None:
    old = counts_at(once, once.points.saved).old
    assert old.images == 8 * len(BASE)
    points = round(float(percent(old.after / old.images)) - float(percent(old.before / old.images)), 1)
    assert points < 0
    assert titles_of(pages["once"]) == (
        f"v2 knows {len(NEW)} more classes; of {old.images} images of old classes it answers "
        f"{percent(old.after / old.images)}% right, {-points} points lower than before."
    )
    assert "knows 3 more classes; of" in titles_of(pages["twice"])
    measured = extended.saved.history[-1]["measured"]
    told = titles_of(pages["without images"])
    assert f"of its old classes it answers {percent(measured['after']['base'])}% right" in told
    assert titles_of(pages["base"]) == f"base knows {len(BASE)} classes."
    assert "and answers" in titles_of(pages["base with images"])


def titles_of(page: str) -> str:
    """The page's title line."""
    found = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)
    assert found
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", found[1])).replace(" ;", ";")


@pytest.mark.parametrize(("before", "after"), [(0.9724, 0.9675), (0.5, 0.5), (0.123, 0.987), (0.33333, 0.66666)])
def test_before_after_and_change_agree(before: float, after: float) -> None:
    shown = change(before, after).replace("\N{MINUS SIGN}", "-").replace("±", "")
    assert round(float(percent(before)) + float(shown), 1) == float(percent(after))


def test_two_steps_are_told_one_after_the_other(pages: dict[str, str]) -> None:
    page = Page(pages["twice"])
    told = [text.strip() for tag, text in page.texts if tag == "h3"]
    assert [each for each in told if each in ("Base", "Step 1", "Step 2")] == ["Base", "Step 1", "Step 2"]
    assert "loss" in page.shown
    curves = [e.attributes["aria-label"] for e in page.of("svg") if "curve" in (e.attributes.get("class") or "")]
    assert [str(label).split(":")[0] for label in curves] == ["step 1", "step 2"]
    assert "Images of earlier classes answered with later ones" in page.shown
    assert "by base" in page.shown
    assert "by step 2" in page.shown


def test_without_images_it_says_how_to_get_the_rest(pages: dict[str, str], extended: api.Model) -> None:
    shown = Page(pages["without images"]).shown
    assert "branchout report models/v2 TEST/" in shown
    assert "Accuracy per class" not in shown
    measured = extended.saved.history[-1]["measured"]
    assert f"{percent(measured['before']['base'])} before" in shown
    assert f"Accuracy on {measured['images']} held-out test images" in shown
    assert "img" not in {element.tag for element in Page(pages["without images"]).elements}


def test_a_base_model_gets_a_smaller_page(pages: dict[str, str]) -> None:
    shown = Page(pages["base"]).shown
    assert "This is a base model" in shown
    assert "Operating points" not in shown
    assert "Accuracy per class" in Page(pages["base with images"]).shown
    assert "Forgotten" not in Page(pages["base with images"]).shown
    assert "dial" not in {element.attributes.get("id") for element in Page(pages["base with images"]).elements}


def test_pseudo_exemplars_are_no_measurement(base: api.Model, train: Samples, val: Samples) -> None:
    model = base.extend(train.of_classes(NEW), val=val.of_classes(NEW), epochs=2)
    shown = Page(render(model.report_data())).shown
    assert "Base accuracy was not measured : no images of old classes were held out" in shown
    assert "Base accuracy in this chart is accuracy on pseudo-exemplars" in shown
    assert "On 12 held-out test images, in % goal b novel all" in shown
    assert METRICS["base"].meaning not in shown
    novel = percent(model.saved.history[-1]["measured"]["after"]["novel"])
    assert f"novel {METRICS['novel'].meaning} {novel} %" in shown
    with_images = Page(render(model.report_data(val.of_classes([*BASE, *NEW])))).shown
    assert METRICS["base"].meaning in with_images
    assert "Base accuracy was not measured" not in with_images


def test_held_out_images_are_called_so(base: api.Model, train: Samples, val: Samples) -> None:
    model = base.extend(train.of_classes(NEW[:1]), memory=exemplars(train), epochs=1)
    page = Page(render(model.report_data()))
    assert "held out from the images given" in page.shown
    assert "1 new class " in page.shown
    # With other images, the page says why its numbers are not those that `extend` printed.
    measured = model.saved.history[-1]["measured"]
    told = Page(render(model.report_data(val.of_classes(model.classes)))).shown
    assert f"extend counts other images, {measured['images']} that it held out" in told
    base_before, base_after = (percent(measured[when]["base"]) for when in ("before", "after"))
    assert f"base {base_before} → {base_after}%, novel {percent(measured['after']['novel'])}%." in told


def test_a_point_set_by_hand_is_told_in_words(extended: api.Model) -> None:
    *earlier, last = extended.saved.step_points
    model = api.Model(replace(extended.saved, step_points=(*earlier, replace(last, goal="b=-0.435327"))), None)
    shown = Page(render(model.report_data())).shown
    assert "b=-0.435327" not in shown
    assert "saved point: set by hand" in shown
    model = api.Model(replace(extended.saved, step_points=(*earlier, replace(last, goal="novel>=0.8"))), None)
    assert "saved point: goal novel ≥ 80%" in Page(render(model.report_data())).shown


def test_trained_points_are_told_by_alpha_and_beta(base: api.Model, train: Samples, val: Samples) -> None:
    model = base.extend(
        train.of_classes([*NEW, BASE[1]]),
        memory=exemplars(train),
        val=val.of_classes([*BASE, *NEW]),
        recipe="paper",
        epochs=2,
    )
    page = Page(render(model.report_data(val.of_classes([*BASE, *NEW]))))
    alpha, beta = model.frontier.settings[model.saved.step_points[-1].point]
    assert "goal α, β all" in page.shown
    assert f"balanced ◂ saved {alpha:g}, {beta:g} " in page.shown
    assert page.data["points"][page.data["saved"]] == f"α = {alpha:g}, β = {beta:g}"
    assert "trained pair of α and β" in page.shown
    assert "b = " not in page.shown
    assert len(page.data["points"]) == len(model.frontier)
    crosses = [e for e in page.of("path") if e.attributes.get("class") == "cross"]
    assert len(crosses) == 36 - len(model.frontier) + 1  # one stands in the legend


def test_a_model_with_one_operating_point_says_why_there_is_no_dial(extended: api.Model, val: Samples) -> None:
    *earlier, last = extended.saved.step_points
    frontier = extended.frontier.select(np.array([last.point]))
    points = replace(last, frontier=frontier.to_dict(), point=0)
    kept = replace(extended.saved, step_points=(*earlier, points), history=extended.saved.history[:1])
    model = api.Model(kept, None, extended.device)
    page = Page(render(model.report_data(val.of_classes(model.classes))))
    assert not [element for element in page.of("form") if element.attributes.get("id") == "dial"]
    assert f"There is only one operating point: on the {frontier.images} validation images" in page.shown
    assert "Only one operating point is useful" in page.shown
    assert "position of the dial" not in page.shown
    assert "--val" in page.shown
    assert "only one operating point" not in Page(render(extended.report_data())).shown


def test_a_part_without_images_is_said_to_be_unmeasured(extended: api.Model, val: Samples) -> None:
    shown = Page(render(extended.report_data(val.of_classes(NEW)))).shown
    assert "None of these images measures “base”" in shown
    assert f"base {METRICS['base'].meaning}" not in shown


def test_other_methods_stand_beside_it(extended: api.Model, tmp_path: Path) -> None:
    row = {
        "method": "fine-tuning",
        "point": "all",
        "dataset": "<i>letters",
        "metrics": {"base": 12.5, "novel": 80, "all": 20},
    }
    for number, more in enumerate(({}, {"method": "joint"}, {"base_classes": 999})):
        (tmp_path / f"{number}.json").write_text(json.dumps({**row, **more}))
    page = Page(render(extended.report_data(results=tmp_path)))
    assert "1. fine-tuning all <i>letters 20.0 12.5 80.0" in page.shown
    assert "2. joint" in page.shown
    assert "1 result with other numbers of classes or steps is left out." in page.shown
    assert [text for tag, text in page.texts if tag == "text"].count("2") == 1  # its mark in the chart


def test_losses_are_shown_worst_first_and_galleries_name_both_answers(once: ReportData, pages: dict[str, str]) -> None:
    saved = once.points.saved
    page = Page(pages["once"])
    changes = re.findall(r'class="number change[^"]*" data-value="(-?\d+)"', pages["once"])
    values = [int(each) for each in changes]
    assert values == sorted(values)
    assert values[0] < 0
    counts = counts_at(once, saved)
    small = [row for row in counts.classes if row.before is not None and row.change and row.noise]
    assert pages["once"].count(">within noise<") == len(small)
    assert len(re.findall(r'change (?:up|down)"', pages["once"])) == sum(
        row.before is not None and not row.noise and row.change != 0 for row in counts.classes
    )
    shown = [e for e in page.of("li") if "data-image" in e.attributes]
    assert len(shown) == sum(min(4, len(counts.galleries[kind])) for kind in ("forgotten", "gained"))
    gained = len(counts.galleries["gained"])
    assert f"{gained} images; 4 are shown." in page.shown
    assert "✓ right before" in page.shown
    assert "✗ now: " in page.shown
    assert "✗ before: " in page.shown
    assert "✓ right now" in page.shown


def test_the_script_has_every_answer(once: ReportData, pages: dict[str, str]) -> None:
    data = Page(pages["once"]).data
    assert data["labels"] == once.test.labels
    assert data["before"] == once.test.before
    for point in range(len(once.points)):
        answers = list(data["answers"]["first"])
        for image, place, value in zip(*(data["answers"][key] for key in ("image", "point", "value")), strict=True):
            if place <= point:
                answers[image] = value
        assert answers == once.test.answers.at(point).tolist()
    assert len(data["points"]) == len(data["dev"]["all"]) == len(data["test"]["all"])
    assert data["tune"][data["saved"]] == "branchout tune models/v2 --goal balanced"
    drawn = {e.attributes["data-image"] for e in Page(pages["once"]).of("li") if "data-image" in e.attributes}
    assert {image for image, each in data["thumbnails"].items() if "src" not in each} == drawn  # none is there twice
    assert {int(image) for image in data["thumbnails"]} == once.test.thumbnails.keys()


def test_too_many_answers_stay_out_and_the_page_says_so(once: ReportData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchout.report.page.LIVE_BYTES", 100)
    page = Page(render(once))
    assert "labels" not in page.data
    assert "The accuracies follow." in page.shown


# What it must not do.


def test_nothing_is_fetched(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        parts = Page(page)
        assert not parts.of("link"), name
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", page), name
        for element in parts.elements:
            for key, value in element.attributes.items():
                if key in ("src", "href", "action", "srcset", "data", "poster", "xlink:href"):
                    assert str(value).startswith(("data:image/", "#")), (name, element)
        for link in parts.of("a"):
            target = str(link.attributes["href"])[1:]
            assert target in {element.attributes.get("id") for element in parts.elements}


def test_only_its_own_script_may_run(pages: dict[str, str]) -> None:
    for page in pages.values():
        policy = str(next(e.attributes["content"] for e in Page(page).of("meta") if "http-equiv" in e.attributes))
        assert policy.startswith("default-src 'none'; ")
        script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        assert len(script) == 1
        digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy


def dial(low: float, high: float, points: int) -> dict[str, Any]:
    """A frontier that nobody measured."""
    figures = {name: [0.5] * points for name in ("all", "base", "novel", "overlap", "avg")}
    settings = [[b] for b in np.linspace(low, high, points)]
    return {
        "kind": "dial",
        "settings": settings,
        "figures": figures,
        "images": 6,
        "balanced_by": "mean",
        "measured": "dev",
    }


EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "' onmouseover='alert(4)",
    "&lt;b&gt; $title ${style} %s {0}",
    "\u202eright to left",
)


def test_names_are_harmless() -> None:
    rng = np.random.default_rng(0)
    model = untrained(EVIL[:3], EVIL[3:])
    history = (
        {"what": "opened", "base": EVIL[0]},
        {"what": "extend", "goal": EVIL[1], "recipe": EVIL[2], "when": EVIL[3]},
    )
    kept = SavedModel(model, (StepPoints(dial(-1.0, 1.0, 3), [], 1, EVIL[0]),), history)
    names = list(EVIL) * 4
    pixels = rng.integers(0, 255, (len(names), 32, 32, 1), dtype=np.uint8)
    samples = Samples.build(ArrayPixels(pixels), names, [f"{EVIL[1]}/{n}" for n in range(len(names))])
    facts = api.Model(kept, None).report_data(samples, model_path=f"a/{EVIL[2]}")
    page = Page(render(facts))

    assert [e.tag for e in page.elements if e.tag == "script"] == ["script", "script"]
    for element in page.elements:
        assert not [key for key in element.attributes if key.startswith("on")], element
        assert element.attributes.get("src", "data:").startswith("data:")  # type: ignore[union-attr]
    for name in EVIL:
        assert printable(name) in page.shown  # shown to the letter
    assert set(page.data["classes"]) == set(map(printable, EVIL))
    # With other names the page has the very same elements.
    tame = replace(facts, classes=[f"class {n}" for n in range(len(EVIL))])
    assert [e.tag for e in Page(render(tame)).elements] == [e.tag for e in page.elements]


def test_it_stays_small_with_many_large_pictures() -> None:
    rng = np.random.default_rng(0)
    model = untrained("abc", "de")
    kept = SavedModel(model, (StepPoints(dial(-30.0, 30.0, 40), [], 20, "all"),), ())
    pixels = np.repeat(rng.integers(0, 255, (300, 180, 180, 1), dtype=np.uint8), 3, 3)  # noise is the worst to store
    names = list("abcde") * 60
    facts = api.Model(kept, None).report_data(Samples.build(ArrayPixels(pixels), names, names))
    assert len(facts.test.thumbnails) == 120  # two galleries, and no room for other positions of the dial
    assert len(render(facts)) < 5_000_000


# Readers of every kind.


def test_it_can_be_read_aloud_and_without_colour(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        page = Page(text)
        assert len(page.of("h1")) == 1
        levels = [int(e.tag[1]) for e in page.elements if re.fullmatch("h[1-6]", e.tag)]
        assert all(b - a <= 1 for a, b in pairwise(levels)), name
        for picture in page.of("img"):
            assert picture.attributes["alt"]
        for cell in page.of("th"):
            assert cell.attributes["scope"] in ("row", "col")
        assert len(page.of("caption")) == len(page.of("table"))
        for drawing in page.of("svg"):
            assert drawing.attributes.get("aria-label") or drawing.attributes.get("aria-hidden") == "true"
        labelled = {e.attributes.get("for") for e in page.of("label")}
        for field in [*page.of("input"), *page.of("select")]:
            assert field.attributes.get("id") in labelled or "label" in field.within
        ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
        assert len(ids) == len(set(ids))
    assert "@media print" in pages["once"]
    assert "prefers-color-scheme: dark" in pages["once"]


def test_the_same_model_gives_the_same_page(
    extended: api.Model, once: ReportData, val: Samples, pages: dict[str, str]
) -> None:
    again = extended.report_data(val.of_classes(extended.classes), gallery=4, model_path="models/v2")
    assert render(replace(again, made=once.made)) == pages["once"]


# The command.


class Place(NamedTuple):
    root: Path
    model: Path
    test: Path


@pytest.fixture
def place(extended: api.Model, val: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    model = api.Model(extended.saved, None).save(tmp_path / "v2")
    for number in range(len(val)):
        if val.names[number] in model.classes:
            folder = tmp_path / "test" / str(val.names[number])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(val.read(number)[:, :, 0]).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, tmp_path / "v2", tmp_path / "test")


def test_the_report_lies_beside_the_model(place: Place) -> None:
    status, told, wrong = run("report", "v2/", "test")
    assert (status, wrong) == (0, "")
    assert re.search(r"v2-report\.html \(\d+\.\d kB\)", told)
    page = Page((place.root / "v2-report.html").read_text(encoding="utf-8"))
    assert "Accuracy on 88 labelled images" in page.shown
    assert "branchout tune v2 --goal balanced" in page.shown
    assert sorted(path.name for path in place.root.iterdir()) == ["test", "v2", "v2-report.html"]


def test_without_test_the_next_command_is_told_and_an_earlier_report_is_replaced(place: Place) -> None:
    (place.root / "my results").mkdir()
    page = place.root / "my results" / "page.html"
    for _ in range(2):
        status, told, wrong = run("report", place.model, "--out", page)
        assert (status, wrong) == (0, "")
        assert f"next:\n  branchout report {place.model} TEST/" in told
    assert "Accuracy per class" not in page.read_text(encoding="utf-8")
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_no_pictures_if_none_are_wanted(place: Place) -> None:
    assert run("report", place.model, place.test, "--gallery", "0", "--out", "page.html")[0] == 0
    assert not Page((place.root / "page.html").read_text(encoding="utf-8")).of("img")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["v2", "--out", "test"], ["test is a folder, and a report is one file", "--out test/report.html"]),
        (["v2", "--out", "v2/branchout.json"], ["already exists and is not a report"]),
        (["v2", "--out", "v2/branchout.json/page.html"], ["cannot be written"]),
        (["v2", "nowhere"], ["There is no folder", "nowhere"]),
        (["v2", "--results", "nowhere"], ["nowhere does not exist"]),
        (["v2", "--results", "test"], ["contains no results"]),
        (["v3"], ["There is no saved model v3", "v2"]),
        (["test"], ["test is not a saved model", "branchout.json"]),
    ],
)
def test_wrong_words_are_answered_kindly(place: Place, words: list[str], said: list[str]) -> None:
    before = (place.model / "branchout.json").read_bytes()
    status, _, wrong = run("report", *words)
    assert status == 1
    assert wrong.startswith("error: ")
    assert "Traceback" not in wrong
    for word in said:
        assert word in wrong
    assert (place.model / "branchout.json").read_bytes() == before
    assert not list(place.root.glob("*.html"))


def test_images_of_unknown_classes_are_named(place: Place) -> None:
    (place.test / "kiwi").mkdir()
    Image.new("L", (32, 32)).save(place.test / "kiwi" / "one.png")
    status, _, wrong = run("report", "v2", "test")
    assert status == 1
    assert "does not know 1 of these classes: kiwi" in wrong


def test_a_model_that_was_never_saved_needs_a_name(extended: api.Model, tmp_path: Path) -> None:
    model = api.Model(extended.saved, None)
    with pytest.raises(BranchoutError, match="its report needs a name"):
        model.report()
    assert model.report(out=tmp_path / "page.html") == tmp_path / "page.html"


def test_the_help_lists_it() -> None:
    status, told, _ = run("--help")
    assert status == 0
    assert re.search(r"^ *report +Write an HTML report", told, re.MULTILINE)


def test_near_duplicates_are_counted_where_there_are_any(extended: api.Model) -> None:
    *earlier, last = extended.saved.history
    kept = replace(extended.saved, history=(*earlier, {**last, "near-duplicates": 1234}))
    assert "near-duplicates 1,234 images" in Page(render(api.Model(kept, None, extended.device).report_data())).shown
    assert "near-duplicates" not in Page(render(extended.report_data())).shown
