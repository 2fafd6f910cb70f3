"""The page of results: one file, every line unfolds to what made it, and nothing in it is taken for markup."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser, fits, visited
from measured import PLACE, alone, row, write
from test_figures import rows as figure_rows

from benchmarks.paper.__main__ import main, write_pages
from benchmarks.paper.page import GENERATOR, PAINTS, html, inline, seconds
from benchmarks.paper.report import read, report
from branchout.errors import BranchoutError

VOID = {"meta", "br", "path", "use", "rect"}
DATASET = "toys"


def full(method: str, point: str, **figures: float) -> dict[str, Any]:
    """A row with all that rows have."""
    return {
        **row(method, point, **figures),
        "seeds": [1, 2, 3], "std": dict.fromkeys(figures, 0.25), "alpha": [0.2, 0.4, 0.2], "beta": [1.0, 0.8, 1.0],
        "b": None, "two_fold": {"all": 60.125}, "parameters": 8_571_200, "seconds": {"stage1": 6.14, "fusion": 0.6},
        "peak_memory_bytes": 40_957_036_544, "versions": {"torch": "2.11.0"}, "commit": "490a2a3004ec",
        "command": "branchout bench disjoint-40 --data 'tiny <data>' && echo \"done\"",
    }  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    measured = {
        ("score-fusion-reference", "all"): {"all": 61.0, "base": 62.0, "novel": 55.0, "avg": 58.5},
        ("score-fusion-branchout", "avg"): {"all": 58.0, "base": 57.0, "novel": 73.0, "avg": 65.0},
        ("joint", "plain"): {"all": 62.5, "base": 61.0, "novel": 63.0, "avg": 62.0},
        ("joint", "dial-avg"): {"all": 59.0, "base": 58.0, "novel": 75.0, "avg": 66.5},
        ("lwf", "plain"): {"all": 40.9, "base": 36.7, "novel": 78.6, "avg": 57.7},
        ("lwf", "dial-avg"): {"all": 40.0, "base": 35.0, "novel": 80.0, "avg": 57.9},
    }
    write(tmp_path, [(name, point, full(name, point, **figures)) for (name, point), figures in measured.items()])
    return tmp_path


class Tree(HTMLParser):
    """Checks that every element is closed where it was opened, and keeps what tests ask for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.counts: Counter[str] = Counter()
        self.shown: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.counts[tag] += 1
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name == "href" and value]
        assert not any(name.startswith("on") or name == "src" for name in told)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def page_of(out: Path, link: str = "../results") -> str:
    return html(report(out, DATASET), link, {})


def test_the_page_is_whole_and_asks_for_nothing(out: Path) -> None:
    page = page_of(out, str(out))
    tree = Tree(page)
    assert len(set(tree.ids)) == len(tree.ids)
    inner = [link[1:] for link in tree.links if link.startswith("#")]
    assert set(inner) <= set(tree.ids)
    assert len(inner) > 4
    outer = {link for link in tree.links if not link.startswith("#")}
    assert outer == {str(out / path) for path in read(out)}  # every row, and nothing else
    assert not re.search(r"https?://|@import|url\(", page)
    assert tree.counts["script"] == tree.counts["img"] == tree.counts["link"] == 0
    assert GENERATOR in page[:400]


def test_every_line_unfolds_to_what_made_it(out: Path) -> None:
    page = page_of(out)
    lines = re.findall(r'<tr><th scope="row"><details>.*?</tr><tr class="more">.*?</tr>', page)
    assert len(lines) == 5 + 1 + 4 + 2  # in Table 1, folded there, in Table 3; and once more in each, half by half
    fusion = next(line for line in lines if "score fusion best-Acc<sub>all</sub>" in line)
    for told in (
        'href="../results/toys/disjoint-40/resnet10/score-fusion-reference-all.json"',
        "branchout bench disjoint-40 --data &#39;tiny &lt;data&gt;&#39; &amp;&amp; echo &#34;done&#34;",
        "490a2a3004ec",
        "an abacus; torch 2.11.0",
        "<dt>seeds</dt><dd>1, 2, 3</dd>",
        "α = 0.2, 0.4, 0.2; β = 1, 0.8, 1",
        "all 61.00 ± 0.25; base 62.00 ± 0.25",
        "8,571,200 without heads",
        "stage1 6.1 s, fusion 0.6 s",
        "41.0 GB",
        'title="± 0.25 over 3 seeds"',
    ):
        assert told in fusion, told
    assert "sharing" not in page


def test_a_row_with_one_seed_has_no_spread(out: Path) -> None:
    alone_ = {
        **full("lwf", "plain", all=40.9, base=36.7, novel=78.6, avg=57.7),
        "seeds": [1],
        "b": [-0.5],
        "alpha": None,
    }
    write(out, [("lwf", "plain", {**alone_, "beta": None})])
    line = next(line for line in page_of(out).split('<tr><th scope="row">') if "<summary>LwF</summary>" in line)
    assert "one seed, so no spread" in line
    assert "±" not in line
    assert "b = −0.5" in line


def test_shared_machines_are_told_beside_the_seconds() -> None:
    content = {"seconds": {"train": 43.0}, "hardware": "NVIDIA H200"}
    assert seconds(content) == "train 43 s"
    assert seconds({**content, "gpu_shared": True}).endswith("measured while other processes shared the GPU")


def test_bold_is_the_best_that_is_no_oracle_on_either_side(out: Path) -> None:
    table = page_of(out).split('<table class="results">')[1].split("</table>")[0]
    # The paper's best, then ours; joint training is above them in both columns.
    assert re.findall(r"<b>([\d.]+)</b>", table) == ["63.2", "61.0", "70.1", "65.0"]


def test_names_are_never_markup(out: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\"'&"
    content = {**full("x", "plain", all=1.0), "label": evil, "hardware": evil, "commit": evil, "seeds": [evil, 2]}
    write(out, [("home", "plain", content)], Path("toys/disjoint-40-split2/resnet10"))
    (out / "toys").rename(out / "a<b>&c")
    page = html(report(out, "a<b>&c"), 'the "results"', {})
    tree = Tree(page)
    assert tree.counts["img"] == 0
    assert "Results on a<b>&c" in "".join(tree.shown)
    assert evil in "".join(tree.shown)
    assert all(" " not in link and '"' not in link for link in tree.links)


def test_claims_are_summed_up_and_stand_by_their_table(out: Path) -> None:
    page = page_of(out)
    sections = page.split("<section ")
    assert "What the paper claims, and whether it holds here" in sections[1]
    for place in (sections[1], sections[2]):
        told = re.search(
            r'class="verdict does-not-hold">does not hold</span><div><p>Best-Acc<sub>all</sub> is within', place
        )
        assert told
        assert "Likely reason: no reason is known yet." in place
        assert "all 61.0 ± 0.3 against 62.5 ± 0.3" in place
    counts = {name: int(number) for name, number in re.findall(r"<dt>([a-z ]+)</dt><dd><b>(\d+)</b>", sections[1])}
    assert counts["does not hold"] == 1
    assert sum(counts.values()) == sections[1].count('<span class="verdict')


SVG = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "x" "http://www.w3.org/x.dtd">
<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="252pt" height="201.6pt" viewBox="0 0 252 201.6">
 <metadata><rdf xlink:href="http://purl.org">x</rdf></metadata>
 <g id="figure_1"><path id="m1" style="fill: #ffffff"/>
 <use xlink:href="#m1" width="3" clip-path="url(#p)" stroke="#0072b2"/></g>
</svg>"""


def test_a_figure_within_a_page_has_names_and_colours_of_its_own() -> None:
    found = inline(SVG, "fig-a")
    assert found.startswith("<svg")
    assert "metadata" not in found
    assert "pt" not in found.split(">")[0].replace("http", "")
    for told in (
        'id="fig-a-figure_1"',
        'href="#fig-a-m1"',
        "url(#fig-a-p)",
        "var(--paper)",
        "var(--blue)",
        'width="3"',
    ):
        assert told in found


def test_from_the_command_line_to_the_browser(browser: Browser, out: Path, tmp_path: Path) -> None:
    figure_rows(out)
    docs = tmp_path / "docs"
    pages = (out, DATASET, docs / "found.md")
    made = write_pages(*pages)
    assert made == [docs / "found.md", docs / "found.html"]
    text = (docs / "found.md").read_text()
    assert "[one page](found.html)" in text
    pictures = re.findall(r'<img src="([^"]+)"', text)
    assert len(pictures) == 3
    assert all((docs / picture).is_file() for picture in pictures)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (docs / link).exists()
    page = (docs / "found.html").read_text()
    tree = Tree(page)
    assert tree.counts["svg"] == 3
    assert len(set(tree.ids)) == len(tree.ids)
    assert not any(paint in page.split("</style>")[1] for paint in PAINTS)
    for link in tree.links:
        assert link.startswith("#") or (docs / link).exists()
    numbers = {json.loads(path.read_text())["novel_alone"] for path in (out / "toys").glob("base-classes-*/*/*.json")}
    assert len(numbers) > 10
    assert all(f"{number:.1f}" in page for number in numbers)

    for width, dark in ((1280, False), (390, True)):
        with visited(browser, (docs / "found.html").as_uri(), width=width, dark=dark) as shown:
            assert fits(shown)
            first = shown.locator(".results summary").first
            facts = shown.locator("tr.more").first
            assert not facts.is_visible()
            first.click()
            assert facts.is_visible()
            assert "branchout bench disjoint-40" in facts.inner_text()
            first.click()
            assert not facts.is_visible()
            paper = shown.evaluate("getComputedStyle(document.querySelector('.drawn svg path')).fill")
            assert paper == shown.evaluate("getComputedStyle(document.body).backgroundColor")

    write_pages(*pages)  # an earlier page is overwritten
    (docs / "found.html").write_text("my diary")
    with pytest.raises(BranchoutError, match=r"found\.html already exists and is not a results page"):
        write_pages(*pages)
    assert (docs / "found.html").read_text() == "my diary"


def test_the_page_option_names_the_markdown(out: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"--page {out / 'a.md'}")):
        main(["--data", DATASET, "--results", str(out), "--page", str(out / "a.html")])
    assert not (out / "a.html").exists()


def test_rows_of_figures_unfold_too(out: Path) -> None:
    alone(out, {20: {"fc": 50.0, "stem": 61.23}})
    picture = Path("figures/fig-base-classes.svg")
    page = html(report(out, DATASET, [picture]), "results", {picture.stem: SVG})
    section = page.split("Figure 2, left")[-1]
    assert '<td class="number here">61.2</td>' in section
    assert "toys/base-classes-20/resnet10/alone-stem-alone.json" in section
    assert str(PLACE) not in section
