"""The pages in docs/ are those that the rows give; the first is one screen."""

import csv
import io
import re
from pathlib import Path

import pytest
from browsing import opened_browser, visited
from measured import ROOT, row

from benchmarks.paper.__main__ import main
from benchmarks.paper.explore import as_csv, as_html
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.markdown import anchor, footnotes, plain, signed
from benchmarks.paper.pages import pages, table_page
from benchmarks.paper.rows import Row
from benchmarks.paper.screen import screen
from benchmarks.paper.tables import DATASETS, scenarios, sections

Rows = dict[Path, Row]


@pytest.fixture(scope="module")
def written(measured_rows: Rows) -> dict[str, str]:
    found = pages(measured_rows, ROOT / "results", {name: list(FIGURES) for name in DATASETS})
    return {**found, "results/rows.csv": as_csv(measured_rows), "results/rows.html": as_html(measured_rows)}


def test_the_pages_are_those_of_the_rows(written: dict[str, str]) -> None:
    for name, text in written.items():
        there = (ROOT / "docs" / name).read_text(encoding="utf-8")
        there, text = (
            re.sub(r" Not measured: .*", "", each) for each in (there, text)
        )  # depends on the methods there are
        assert there == text, f"docs/{name} is not what results/ gives; type: python -m benchmarks.paper"
    there = {f"results/{path.name}" for path in (ROOT / "docs" / "results").iterdir()}
    assert there == set(written) - {"results.md"}


def test_the_first_page_is_one_screen(written: dict[str, str]) -> None:
    text = written["results.md"]
    assert len(re.findall(r"^\d\. ", text, re.MULTILINE)) == 5
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    assert len(lines) == 12
    assert "imagenet-flowers/default" in lines[0]  # the strong base is first
    assert text.count("![") == 1
    assert len(re.findall(r"[\w.]+", re.sub(r"\]\([^)]+\)", "]", text))) < 620


def test_the_claims_are_fourteen_lines(written: dict[str, str]) -> None:
    table = written["results/claims.md"].split("## Tiny-ImageNet")[1].split("\n\n")[1]
    assert len(table.splitlines()) - 2 == 14


def test_measured_columns_come_before_the_papers(written: dict[str, str]) -> None:
    shown = 0
    for name, text in written.items():
        for heading in re.findall(r"^\|  \| .+ \|$", text, re.MULTILINE) if "table-" in name else ():
            of_paper = [cell.strip().startswith("paper") for cell in heading.strip("|").split("|")]
            assert of_paper == sorted(of_paper)
            shown += any(of_paper)
    assert shown >= 12


def test_every_row_is_in_the_table_of_all_rows(measured_rows: Rows) -> None:
    found = list(csv.DictReader(io.StringIO(as_csv(measured_rows))))
    assert {Path(each["file"]) for each in found} == set(measured_rows)
    assert found[0]["experiment"] == "photos"


def test_a_superseded_row_is_marked_with_one_footnote(measured_rows: Rows) -> None:
    path = Path("tiny-imagenet-200/overlap-style/resnet10/logitcat-max-dial-avg.json")
    old = Row(path, {**measured_rows[path].data, "superseded": "its dial moved one column only"})
    found = pages({**measured_rows, path: old}, ROOT / "results", {})
    page = found["results/table-5.md"]
    value = measured_rows[path].value("avg")
    assert re.search(rf"\[{value:.1f}[^\]]*\]\(\S+logitcat-max-dial-avg\.json\) † \|", page)
    assert page.count("To be measured again") == 1
    assert "1 row: its dial moved one column only." in found["results/definitions.md"]
    assert footnotes("no marks") == "no marks\n"


def test_the_sentences_leave_out_rows_that_are_to_be_measured_again(measured_rows: Rows) -> None:
    """Of the best other method both rows count: the lower one might be better once it is measured again."""

    def counted(rows: Rows) -> int:
        found = re.search(r"best other method, .* of (\d+) scenarios", screen(rows))
        assert found
        return int(found[1])

    def with_mark(path: Path) -> Rows:
        return {**measured_rows, path: Row(path, {**measured_rows[path].data, "outdated": "its bias layer"})}

    each = next(each for each in scenarios(measured_rows)[1:] if each.rival and not each.rival_marks)
    assert each.rival
    stem = re.sub("-(plain|dial-balanced)$", "", each.rival.path.stem)
    both = [each.rival.path.with_name(f"{stem}-{point}.json") for point in ("plain", "dial-balanced")]
    for path in [each.ours.path, *(path for path in both if path in measured_rows)]:
        assert counted(with_mark(path)) == counted(measured_rows) - 1
        assert f"Not counted: *{each.name}* (†" in screen(with_mark(path))
    assert "Not counted" not in screen(measured_rows)


def test_a_section_says_what_is_not_measured(measured_rows: Rows) -> None:
    less = {path: each for path, each in measured_rows.items() if path.stem != "podnet-plain"}
    shown = [section for section in sections("tiny-imagenet-200", less) if section.number == "2"]
    assert re.search(r"Not measured: [^.]*PODNet", table_page("table-2", shown))


@pytest.mark.parametrize(("variant", "told"), [("split9", "other classes (split 9)"), ("exemplars7", "7 exemplars")])
def test_a_table_with_other_classes_or_exemplars_follows_it(measured_rows: Rows, variant: str, told: str) -> None:
    folder = Path("tiny-imagenet-200", "disjoint-40", "resnet10")
    names = ("score-fusion-branchout-all", "bic-plain")  # BiC is of another table that shares these rows
    rows = {folder / f"{name}.json": measured_rows[folder / f"{name}.json"] for name in names}
    other = {Path(folder.parts[0], f"disjoint-40-{variant}", "resnet10", path.name): row for path, row in rows.items()}
    section = sections("tiny-imagenet-200", {**measured_rows, **other})
    (found,) = [each for each in section if each.table.experiment == f"disjoint-40-{variant}"]
    assert found.heading == f"Tiny-ImageNet, ResNet10, {told}"
    assert (" --split 9" if variant == "split9" else " --exemplars 7") in found.command
    assert found.page == "table-3-variants"
    assert [line.row for line in found.lines] == list(rows.values())
    assert found.missing == ()
    before = section[section.index(found) - 1]
    assert before.number == found.number


def test_text_and_numbers_are_written_plainly() -> None:
    assert plain("a|b <i> [x](y) `c` *d*") == r"a\|b \<i\> \[x\](y) \`c\` \*d\*"
    assert [signed(value) for value in (0.04, -0.04, -2.25, 62.15)] == ["0.0", "0.0", "−2.3", "62.2"]
    assert anchor("Best-Acc_all, α: (one)") == "best-acc_all-α-one"


def test_a_folder_without_rows_is_an_error_with_the_next_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no rows; make some with: branchout bench"):
        main(["--results", str(tmp_path), "--docs", str(tmp_path)])


def test_rows_of_another_dataset_have_a_table_too() -> None:
    other = row("toys/disjoint-8+2/resnet10/bic-plain.json", all=50.0, label="home|made </script><b>", dataset="toys")
    text = pages({other.path: other}, ROOT / "results", {})["results.md"]
    assert "not measured" in text
    assert "</script><b>" not in as_html({other.path: other})


def test_the_table_of_all_rows_can_be_searched_and_sorted() -> None:
    address = (ROOT / "docs" / "results" / "rows.html").as_uri()
    with opened_browser() as browser, visited(browser, address) as page:
        page.fill("input[type=search]", "podnet multistep resnet18")
        shown = page.locator("tbody tr")
        assert shown.count() == 4
        page.select_option("select >> nth=3", "plain")
        assert shown.count() == 1
        link = page.locator("tbody tr a").first.get_attribute("href") or ""
        assert (ROOT / "docs" / "results" / link).resolve().is_file()
        page.select_option("select >> nth=3", "")
        page.click("th button:text-is('avg')")
        names = [text.strip(" ▲▼") for text in page.locator("th").all_inner_texts()]
        place = names.index("avg")
        values = [float(text) for text in page.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()]
        assert values == sorted(values, reverse=True)
        assert page.locator("output").inner_text().startswith("4 of ")
