"""The pages people read show only commands, files and numbers that exist."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import typer

import branchout
from branchout.baselines.registry import baselines
from branchout.bench import tables
from branchout.bench.rows import number as rounded
from branchout.cli import app
from branchout.goals import POOLERS, check_goal
from branchout.method.recipes import PAPER, recipe_named
from branchout.model.resnet import build
from branchout.model.staged import Branch, branch_point
from branchout.model.timm_adapters import SPLITTERS
from branchout.serve.limits import Limits

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = ("how-it-works", "operating-points", "exemplars", "overlapping-classes", "branch-depth", "troubleshooting")
GENERATED = ("results", "baselines")
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else page.stem)
each_picture = pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")


def blocks(page: Path, language: str) -> list[str]:
    return [body for told, body in BLOCK.findall(page.read_text(encoding="utf-8")) if told == language]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


# Commands.


def typed(page: Path) -> Iterator[list[str]]:
    """The words after `branchout` of every command in a block, as a shell would split them."""
    for line in "\n".join(blocks(page, "")).splitlines():
        found = re.match(r"\s*(?:[A-Z_]+=\S*\s+)?branchout\s+(\S.*)", line)
        if found:
            yield shlex.split(found[1], comments=True)


def mentioned(page: Path) -> Iterator[list[str]]:
    """The same of commands within a sentence, which may be cut short and wrapped."""
    for code in INLINE.findall(prose(page)):
        found = re.match(r"(?:[A-Z_]+=\S*\s+)?branchout\s+([a-z]\S*.*)", code, re.DOTALL)
        if found:
            yield shlex.split(found[1].replace("…", " "))


def options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Each option with what follows it."""
    for number, word in enumerate(words, 1):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            yield name, value or "".join(words[number : number + 1])


def check_values(name: str, words: list[str]) -> None:
    for option, value in options(words):
        if option == "--goal":
            check_goal(value)
        elif option == "--recipe":
            recipe_named(value)
        elif option == "--pooler":
            assert value in POOLERS, f"branchout {name} knows no pooler {value}"


@each_page
def test_every_command_in_a_block_could_be_typed(page: Path) -> None:
    """Parsed as the program would: unknown options, missing or surplus arguments and wrong numbers are refused."""
    shown = list(typed(page))
    assert shown or page.stem not in GUIDES
    for name, *words in shown:
        assert name in COMMANDS, f"{page.name} shows branchout {name}"
        try:
            COMMANDS[name].make_context(name, list(words))
        except Exception as error:
            pytest.fail(f"{page.name}: branchout {name} {shlex.join(words)}: {error}")
        check_values(name, words)


@each_page
def test_every_command_in_a_sentence_exists(page: Path) -> None:
    for name, *words in mentioned(page):
        assert name in COMMANDS, f"{page.name} speaks of branchout {name}"
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        for option, _ in options(words):
            assert option in known, f"{page.name}: branchout {name} has no {option}"
        check_values(name, words)


@each_page
def test_every_option_named_on_its_own_exists(page: Path) -> None:
    known = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    for code in INLINE.findall(prose(page)):
        if code.startswith("--"):
            for option, value in options(shlex.split(code)):
                assert option in known, f"{page.name}: no command has {option}"
                if option == "--goal" and value:
                    check_goal(value)


def test_every_goal_of_the_table_is_one() -> None:
    page = (ROOT / "docs" / "operating-points.md").read_text(encoding="utf-8")
    table = page.split("| goal | what", 1)[1].split("\n\n", 1)[0]
    goals = {goal.strip("'") for goal in INLINE.findall(table)}
    assert {"all", "avg", "balanced", "novel", "base", "overlap"} <= goals
    assert sum(check_goal(goal) is not None for goal in goals - {"extend"}) >= 3


def test_the_checks_see_commands() -> None:
    """A pattern that no longer matches would let everything pass."""
    assert sum(1 for page in PAGES for _ in typed(page)) >= 30
    assert sum(1 for page in PAGES for _ in mentioned(page)) >= 10


def test_the_readme_is_short_and_starts_with_the_two_commands() -> None:
    assert README.index("make demo") < README.index("branchout extend")
    assert "make test" in README
    assert len(README.split()) <= 550


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@each_page
def test_every_make_command_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`make ([a-z]+)`", text) + re.findall(
        r"^make ([a-z]+)", "\n".join(blocks(page, "")), re.MULTILINE
    )
    assert set(named) <= targets(), page.name


# Python.


@each_page
def test_python_blocks_compile(page: Path) -> None:
    for number, block in enumerate(blocks(page, "python"), 1):
        compile(block, f"{page.name}, Python block {number}", "exec")


def test_a_baseline_is_run_from_python_as_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block of docs/baselines.md, with one epoch of everything."""
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    whole = tables.fitted_to
    monkeypatch.setattr(tables, "fitted_to", lambda *given: tables.scheduled(whole(*given), None, 1, 1))
    (block,) = blocks(ROOT / "docs" / "baselines.md", "python")
    names: dict[str, Any] = {}
    exec(block, names)
    assert 0 <= float(capsys.readouterr().out) <= 1
    assert len(names["answers"]) == len(names["test"])
    assert set(names["answers"].tolist()) <= set(range(25))
    scorer = baselines()["fa-bic"]
    assert scorer.on == "features"
    experiment = names["experiment"]
    scorer.learn(experiment.branched(1, PAPER.stage_one)[0], experiment.task(step=1, seed=1))


def test_the_python_page_has_the_functions_and_arguments_of_the_api() -> None:
    """Each heading is a call: its name exists, and so does every argument in it or in the table below it."""
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    shown = set()
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        call = re.match(r"`(branchout|Model)\.(\w+)\((.*)\)`", section)
        if call is None:
            continue
        shown.add(call[2])
        found = getattr(branchout if call[1] == "branchout" else branchout.Model, call[2])
        known = set(inspect.signature(found).parameters)
        named = {part.split("=")[0].strip() for part in call[3].split(",")} - {"*", "…"}
        named |= set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        assert named <= known, f"{call[2]} has no {named - known}"
    assert shown >= {"load", "pretrain", "extend", "predict", "tune", "evaluate", "report", "export", "save"}


# Layers and versions.


def test_the_layers_of_the_page_are_those_of_the_contract() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.split("| layer | what it holds |", 1)[1].split("\n\n", 1)[0]
    named = [re.sub(r"/|\.py", "", name) for name in re.findall(r"^\| `([\w./]+)`", table, re.MULTILINE)]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = reversed(settings["contracts"][0]["layers"])
    assert named == [name for layer in layers for name in layer.strip("()").split(" | ")]
    assert set(named) >= {path.name for path in (ROOT / "branchout").iterdir() if (path / "__init__.py").exists()}


def test_changelog_citation_and_package_have_one_version() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert newest
    assert cited
    assert newest[1] == cited[1] == packaged == branchout.__version__


# Links, files and pictures.


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Headings as a link names them: small letters, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert ROOT in target.parents, f"{page.name} links out of the repository: {link}"
        if anchor and target.suffix != ".json":  # keys of measured files are looked up further below
            assert anchor in anchors(target), f"{page.name} links to {link}"


@each_page
def test_every_file_spoken_of_exists(page: Path) -> None:
    for code in INLINE.findall(prose(page)):
        if re.fullmatch(r"(branchout|docs|tests|results|examples|benchmarks)/[\w./-]*", code):
            assert (ROOT / code).exists(), f"{page.name} speaks of {code}"


def test_the_index_names_every_page() -> None:
    listed = {link for link in links(ROOT / "docs" / "README.md") if "/" not in link}
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


QUAINT = (
    "images that chose nothing",
    "is there already",
    "could not be had",
    "but not of what",
    "had no word for",
    "stand-in",
    "louder",
    "pictures",
)
"""Phrases that pages used to have; each has a plain word in its place."""


@each_page
def test_pages_are_in_plain_words(page: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", prose(page)).lower()  # without the addresses of links
    if page.stem not in GENERATED:
        assert [phrase for phrase in QUAINT if phrase in text] == []


def test_every_picture_is_shown_and_can_be_read() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page) if link.endswith(".svg")}
    assert shown >= {picture.resolve() for picture in PICTURES}
    assert len(PICTURES) >= 3
    for picture in {*shown, *(ROOT / "docs").rglob("*.svg")}:
        assert ET.parse(picture).getroot().tag.endswith("svg"), picture


@each_picture
def test_a_picture_is_grey_on_a_ground_of_its_own(picture: Path) -> None:
    """Readable on dark pages and in print: it brings a light ground, uses no colour, and says what it shows."""
    root = ET.parse(picture).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    assert root.findtext(f"{svg}title")
    assert root.findtext(f"{svg}desc")
    ground = root.find(f"{svg}rect")
    assert ground is not None
    assert [ground.get("width"), ground.get("height")] == root.get("viewBox", "").split()[2:]
    assert int(ground.get("fill", "#000").lstrip("#")[:2], 16) > 0xE0
    for element in root.iter():
        for paint in (element.get("fill"), element.get("stroke")):
            if paint not in (None, "none"):
                digits = re.fullmatch(r"#([0-9a-f]{3}|[0-9a-f]{6})", paint or "")
                assert digits, f"{paint} is no shade written in hexadecimal"
                parts = re.findall("." * (len(digits[1]) // 3), digits[1])
                assert len(set(parts)) == 1, f"{paint} is a colour"


# The site.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it. Strict: broken links, headings that do not exist and pages outside the
    navigation are errors."""
    recipe = re.search(r"^docs:.*\n\t.*\$\(BIN\)/(mkdocs .+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", *shlex.split(recipe[1]), "--site-dir", str(place)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "documentation" in built.stderr, "a build that says nothing counts no warnings either"
    assert len(list(place.rglob("*.html"))) >= 20
    return place


class Built(HTMLParser):
    """The links of a page of the site, and the names that links can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src"):
                self.links.append(value or "")
            elif name in ("id", "name"):
                self.names.add(value or "")


def test_every_link_of_the_site_leads_to_a_file_and_a_heading(site: Path) -> None:
    pages = {path: Built(path) for path in site.rglob("*.html")}
    relative = [
        (path, link) for path, page in pages.items() for link in page.links if not re.match(r"[a-z]+:|//", link)
    ]
    assert len(relative) >= 1000
    broken = []
    for path, link in relative:
        place, _, name = unquote(link).partition("#")
        start = site if place.startswith("/") else path.parent
        target = (start / place.lstrip("/")).resolve() if place else path
        target = target / "index.html" if target.is_dir() else target
        found = target.is_file() and (not name or target not in pages or name in pages[target].names)
        if not found:
            broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)"""
    )
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet
    reference = (site / "command-line" / "index.html").read_text(encoding="utf-8")
    for name, command_found in COMMANDS.items():
        assert f'id="{name}"' in reference or command_found.hidden, name


# Numbers.


def rows_with_files(page: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Rows of tables whose last column, `file`, links to a measured row."""
    heading: list[str] = []
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            heading = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not heading:
            heading = cells
        elif heading[-1] == "file" and "](" in cells[-1]:
            path = re.search(r"\]\(([^)]+)\)", cells[-1])
            assert path
            yield dict(zip(heading, cells, strict=True)), page.parent / path[1]


@each_page
def test_measured_numbers_are_those_of_their_files(page: Path) -> None:
    for row, path in rows_with_files(page):
        measured = json.loads(path.read_text(encoding="utf-8"))["metrics"]
        for name in ("all", "base", "novel", "overlap", "avg"):
            if name in row and row[name] not in ("", "–"):
                assert row[name] == rounded(measured[name]), f"{page.name}: {name} of {path.name}"


@each_page
def test_a_number_that_leads_to_a_key_of_a_file_is_what_the_file_has_there(page: Path) -> None:
    for told, name, keys in re.findall(r"\[([\d.]+)\]\(([^)#]+\.json)#([\w.]+)\)", page.read_text(encoding="utf-8")):
        row = json.loads((page.parent / unquote(name)).read_text(encoding="utf-8"))
        value = {**row, **row["metrics"]}
        for key in keys.split("."):
            value = value[key]
        assert told == rounded(value), f"{page.name}: {name}#{keys}"


@each_page
def test_three_two_fold_numbers_are_those_of_their_file(page: Path) -> None:
    for told, name in re.findall(r"\[([\d.]+ / [\d.]+ / [\d.]+)\]\(([^)#]+\.json)\)", page.read_text(encoding="utf-8")):
        scores = json.loads((page.parent / unquote(name)).read_text(encoding="utf-8"))["two_fold"]
        assert told == " / ".join(rounded(scores[goal]) for goal in ("all", "balanced", "avg")), f"{page.name}: {name}"


def test_the_check_sees_numbers() -> None:
    assert sum(1 for page in PAGES if page.stem in GUIDES for _ in rows_with_files(page)) >= 8


def test_the_readme_says_what_other_images_lose() -> None:
    rows = [
        json.loads((ROOT / "results" / name / "default-cpu.json").read_text(encoding="utf-8"))
        for name in ("clip-art", "garments")
    ]
    lost = " and ".join(rounded(round(row["before"] - row["metrics"]["base"], 2)) for row in rows)
    assert f"old ones lose {lost} points" in " ".join(README.split())


def test_the_readme_says_what_a_weak_base_loses() -> None:
    file = "disjoint-40/resnet10/score-fusion-branchout-balanced.json"
    row = json.loads((ROOT / "results" / "tiny-imagenet-200" / file).read_text(encoding="utf-8"))
    before, after, new = (rounded(n) for n in (row["base_model"], row["metrics"]["base"], row["metrics"]["novel"]))
    assert f"from {before} to {after} while new ones reach {new}" in " ".join(README.split())


FLOWERS = [
    ("**Branchout**", "default-cpu"),
    ("`--branch fc`", "fc-cpu"),
    ("logistic regression", "logistic-regression"),
    ("full fine-tuning", "fine-tuning"),
    ("RanPAC", "ranpac"),
]
"""The name and the file of each row of the first table of the README."""


def test_the_first_table_of_the_readme_is_that_of_its_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \[(.+?)\]\((\S+\.json)\).* \| (\d.*→.*\d) \|$", text, re.MULTILINE)
    assert [(name, Path(file).stem) for name, file, _ in table] == FLOWERS
    for name, file, told in table:
        row = json.loads((ROOT / file).read_text(encoding="utf-8"))
        figures = row["metrics"]
        assert told == f"{row['before']:.2f} → {figures['base']:.2f} | {figures['novel']:.2f}", name
        assert len(row["seeds"]) == 3
        on_gpu = "last three rows ran on a GPU" in " ".join(text.split()) and file in [each[1] for each in table[-3:]]
        assert row["hardware"].endswith("threads") != on_gpu


def test_the_time_of_an_extension_is_that_of_its_file() -> None:
    measured = json.loads((ROOT / "results" / "speed" / "extension-cuda.json").read_text(encoding="utf-8"))["ratio"]
    assert f"took {100 * measured:.0f}% of the time of joint training" in " ".join(README.split())


def test_an_extension_on_two_cores_is_that_of_its_file() -> None:
    row = json.loads((ROOT / "results" / "imagenet-flowers" / "default-cpu.json").read_text(encoding="utf-8"))
    assert "five minutes on two CPU cores" in README
    assert row["hardware"].endswith("2 threads")
    assert [round(seconds / 60) for seconds in row["seconds"]] == [5, 5, 5]


def test_the_demo_is_shown_as_it_was_measured() -> None:
    """The table of docs/README.md, line by line."""
    row = json.loads((ROOT / "results/glyphs/demo/score-fusion-branchout.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert f"{row['images']:,} held-out" in page
    for goal, after in row["points"].items():
        cells = re.search(rf"^│ {goal}\b(.+)│$", page, re.MULTILINE)
        assert cells, goal
        expected = [
            after["all"],
            row["before"]["base"],
            after["base"],
            after["novel"],
            row["before"]["overlap"],
            after["overlap"],
            after["avg"],
        ]
        shown = [float(cell) for cell in re.findall(r"\d+\.\d", cells[1])]
        assert shown == pytest.approx(expected, abs=0.0501), goal


def test_the_dial_is_drawn_as_it_was_measured() -> None:
    """The picture's axes: x = 110 + 9 · base, y = 400 − 4 · novel; its three points are those of the first seed."""
    folder = ROOT / "results" / "tiny-imagenet-200" / "disjoint-40" / "resnet10"
    rows = {
        goal: json.loads((folder / f"score-fusion-branchout-{goal}.json").read_text(encoding="utf-8"))
        for goal in ("all", "balanced", "avg")
    }
    root = ET.parse(ROOT / "docs" / "pictures" / "dial.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"

    def place(figures: dict[str, float]) -> tuple[int, int]:
        return round(110 + 9 * figures["base"]), round(400 - 4 * figures["novel"])

    # Along a level line, its two ends are enough.
    every = [place(point) for point in rows["balanced"]["curve"]]
    inner = [b for a, b, c in zip(every, every[1:], every[2:], strict=False) if not a[1] == b[1] == c[1]]
    drawn = root.find(f"{svg}polyline").get("points", "")  # type: ignore[union-attr]
    assert drawn == " ".join(f"{x},{y}" for x, y in [every[0], *inner, every[-1]])

    circles = [(int(circle.get("cx", "")), int(circle.get("cy", ""))) for circle in root.iter(f"{svg}circle")]
    labels = {"".join(text.itertext()) for text in root.iter(f"{svg}text")}
    for goal, circle in zip(rows, circles, strict=True):
        first = rows[goal]["per_seed"][0]
        assert circle == place(first)
        assert f"{goal}: old {first['base']:.1f}, new {first['novel']:.1f}" in labels


@pytest.mark.parametrize(
    ("network", "places"),
    [
        ("resnet10", ("fc", "layer4.0.conv2", "last", "layer3")),
        ("resnet18", ("fc", "layer4.1.conv2", "last", "layer3")),
    ],
)
def test_parameters_are_what_the_page_says(network: str, places: tuple[str, ...]) -> None:
    page = (ROOT / "docs" / "branch-depth.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {network} \|(.+)\|$", page, re.MULTILINE | re.IGNORECASE)
    assert row
    told = [float(cell.split()[0]) for cell in row[1].split("|")]
    with torch.device("meta"):
        backbone = build(network)
        base = sum(parameter.numel() for parameter in backbone.parameters())
        added = [Branch.clone(backbone, branch_point(backbone, place)).parameter_count for place in places]
    assert told == [round(count / 1e6, 1) for count in (base, *(base + more for more in added))]


def test_the_page_lists_every_family_that_can_be_cut() -> None:
    page = (ROOT / "docs" / "branch-depth.md").read_text(encoding="utf-8")
    table = page.split("| class in timm |", 1)[1].split("\n\n", 1)[0]
    listed = {line.split("|")[1].strip() for line in table.splitlines()[2:]}
    assert listed == set(SPLITTERS) - {"VisionTransformerDistilled"}  # which is there to be refused


def test_the_servers_limits_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = page.split("| limit | value |", 1)[1].split("\n\n", 1)[0]
    shown = dict(re.findall(r"^\| ([^|]+) \| (\d+)", table, re.MULTILINE))
    limits = Limits()
    expected = {
        "size of an image file": limits.file_bytes / 1e6,
        "images in one request": limits.files,
        "pixels of one image": limits.pixels / 1e6,
        "pixels of all images in one request": limits.request_pixels / 1e6,
        "pixels that are decoded at the same time": limits.decoding_pixels / 1e6,
        "time for the headers of a request": limits.header_seconds,
        "time for the body of a request": limits.body_seconds,
        "requests that upload at the same time": limits.uploads,
        "requests that are decoded or answered at the same time": limits.requests,
        "images that wait for the model": limits.waiting,
    }
    assert {name: float(value) for name, value in shown.items()} == expected


@each_page
def test_every_test_that_is_named_exists(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        code = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {name}\(", code, re.MULTILINE), f"{page.name} names {path}::{name}"
