"""The pages are the rows: every number leads to its file, and what drowns a table is folded below it."""

import json
import re
from pathlib import Path

import pytest
from measured import PLACE, papers_own, row, write

from benchmarks.paper import claims
from benchmarks.paper.markdown import markdown, plain
from benchmarks.paper.page import html
from benchmarks.paper.paper_numbers import misprints, paper, paper_label, paper_number, paper_rows
from benchmarks.paper.report import Report, Section, anchor, lines, number, read, report
from branchout.bench.tables import table_named, tables
from branchout.errors import BranchoutError


@pytest.fixture
def out(tmp_path: Path) -> Path:
    measured = {
        ("score-fusion-reference", "all"): {"all": 61.0, "base": 62.0, "novel": 55.0, "avg": 58.5},
        ("score-fusion-reference", "avg"): {"all": 57.0, "base": 56.0, "novel": 72.0, "avg": 64.0},
        ("score-fusion-paper", "avg"): {"all": 57.5, "base": 56.5, "novel": 70.0, "avg": 63.3},
        ("score-fusion-branchout", "avg"): {"all": 58.0, "base": 57.0, "novel": 73.0, "avg": 65.0},
        ("joint", "plain"): {"all": 62.5, "base": 61.0, "novel": 63.0, "avg": 62.0},
        ("joint", "dial-avg"): {"all": 59.0, "base": 58.0, "novel": 75.0, "avg": 66.5},
        ("bic", "plain"): {"all": 58.1, "base": 58.4, "novel": 56.2, "avg": 57.3},
        ("bic", "dial-avg"): {"all": 55.1, "base": 53.4, "novel": 68.2, "avg": 60.8},
        ("lwf", "plain"): {"all": 40.9, "base": 36.7, "novel": 78.6, "avg": 57.7},
    }
    write(tmp_path, [(name, point, row(name, point, **figures)) for (name, point), figures in measured.items()])
    return tmp_path


@pytest.fixture
def whole(tmp_path: Path) -> Report:
    """The paper's own numbers as if they were measured: every table is there."""
    for path, content in papers_own().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    return report(tmp_path, "paper")


def test_the_papers_numbers_stand_beside_the_measured_ones(out: Path) -> None:
    shown = {line.label: line for line in lines(table_named("sota"), "resnet10", "toys", read(out))}
    fusion = shown["score fusion best-Acc_all"]
    assert fusion.paper == paper_rows("sota", "resnet10")["score fusion best-Acc_all"]
    assert fusion.ours is not None
    assert fusion.ours["metrics"]["all"] == 61.0
    assert shown["LwF"].paper is not None
    assert shown["LwF"].ours is not None
    assert shown["iCaRL"].ours is None  # the paper has it, we have not measured it
    assert set(paper_rows("sota", "resnet10")) <= set(shown)


@pytest.mark.parametrize(
    ("table", "method", "point", "label"),
    [
        ("sota", "score-fusion-fc-reference", "balanced", "score fusion fc-only best-balanced"),
        ("branch-depth", "score-fusion-conv2-reference", "balanced", "layer4 (conv2 only): score fusion best-balanced"),
        ("branch-depth", "score-fusion-reference", "balanced", "layer4: score fusion best-balanced"),
        ("disjoint-40", "learned-routing", "plain", "learning-based routing w/ L_rt-bal"),
        ("overlap-style", "logitcat-average", "plain", "logit concatenation (avg pool)"),
        ("sota", "score-fusion-branchout", "all", None),
        ("sota", "bic", "dial-all", None),
    ],
)
def test_rows_bear_the_papers_names_where_it_has_them(table: str, method: str, point: str, label: str | None) -> None:
    assert paper_label(table, method, point) == label
    if label:
        assert label in paper_rows(table, "resnet10")


def test_tables_are_counted_as_the_paper_does(whole: Report) -> None:
    shown = [section.short for section in whole.sections]
    assert shown == [
        "Table 1, ResNet10", "Table 1, ResNet18", "Table 2, ResNet10", "Table 2, ResNet18", "Table 3, ResNet10",
        "Table 4, ResNet10", "Table 5, ResNet10", "Table 6, ResNet10", "Table 6, ResNet18", "Table 7, ResNet18",
        "Table 8, ResNet50", "Table 9, ResNet10", "Table 10a, ResNet10", "Table 10b, ResNet10", "Table 11a, ResNet10",
        "Table 11b, ResNet10",
    ]  # fmt: skip
    assert whole.absent == ()
    assert len({section.number for section in whole.sections}) == 13


def test_with_the_papers_numbers_both_sides_of_every_line_are_the_same(whole: Report) -> None:
    found = 0
    for section in whole.sections:
        for line in section.lines:
            if line.paper and line.ours:
                for name, value in line.paper.items():
                    if name != "parameters_millions":
                        assert line.ours["metrics"][name] == value
                        found += 1
    assert found > 400


def test_every_number_of_ours_links_to_the_file_that_holds_it(out: Path) -> None:
    page = markdown(report(out, "toys"), str(out))
    linked = []
    for line in page.splitlines():
        link = re.search(r"\]\((\S+\.json)\)", line)
        if link:
            metrics = json.loads(Path(link.group(1)).read_text())["metrics"]
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            assert cells[-5:-1] == [f"{metrics[name]:.1f}" for name in ("all", "base", "novel", "avg")]
            linked.append(Path(link.group(1)).relative_to(out))
    assert set(linked) == set(read(out))  # none is left out


def test_the_same_dial_for_rivals_and_variants_are_folded_and_joint_training_with_it_is_not(out: Path) -> None:
    page = markdown(report(out, "toys"), str(out))
    table = page.split("## Table 1, ResNet10")[1].split("## Table 3")[0]
    before, *folds = table.split("<details>")
    assert "| joint learning (oracle) with the dial: best-Acc_avg |" in before
    assert "| Branchout's recipe, the dial: best-Acc_avg |" in before
    assert "| BiC |" in before
    assert "with the dial: best-Acc_avg | 55.1" not in before
    assert "| BiC with the dial: best-Acc_avg | 55.1 | 53.4 | 68.2 | 60.8 |" in folds[0]
    assert "| score fusion, recipe paper: best-Acc_avg | 57.5" in folds[1]
    assert all("\n\n|" in fold and "</details>" in fold for fold in folds)  # or GitHub shows no table
    assert "Not measured: fine-tuning; iCaRL; WA; DER w/o P" in before
    order = [before.index(f"| {name}") for name in ("LwF", "score fusion best", "Branchout's", "joint learning")]
    assert order == sorted(order)


def test_claims_stand_below_their_table_and_in_the_summary(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = markdown(report(out, "toys"), str(out))
    summary, rest = page.split("## Table 1, ResNet10")
    below = rest.split("## Table 3")[0]
    assert re.search(
        r"\| Best-Acc_all is within one point[^|]+\| \*\*does not hold\*\* \| Table 1, ResNet10: ", summary
    )
    told = "Best-Acc_all is within one point of joint training (Acc_all). **Does not hold**: all 61.0 against 62.5"
    assert told in below
    assert "Likely reason: no reason is known yet." in below
    assert "Likely reason: no reason is known yet." in summary
    assert "Best-Acc_avg is above joint training (Acc_avg). **Holds**: avg 64.0 against 62.0" in below
    assert "joint training with the same dial 66.5" in below
    assert "**Not measured**: no row of fine-tuning." in below
    assert "Score fusion is above learning-based routing" not in below  # that is about other tables
    reasons = {"near-joint": "few | images.", "above-joint": "luck."}
    known = {"toys": {key: {"reason": text, "rests_on": {}} for key, text in reasons.items()}}
    monkeypatch.setattr(claims, "_reasons", lambda: known)
    page = markdown(report(out, "toys"), str(out))
    assert page.count("Likely reason: few \\| images.") == 2
    assert "luck" not in page  # it holds


def test_contents_lead_to_headings_and_say_what_is_not_measured(out: Path) -> None:
    page = markdown(report(out, "toys"), str(out), "page.html")
    headings = {anchor(heading) for heading in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    links = re.findall(r"\]\(#([^)]+)\)", page)
    assert len(links) == 3  # the claims and two tables
    assert set(links) <= headings
    assert "- Table 8, ResNet50: not measured yet; `branchout bench disjoint-40 --arch resnet50 --data DIR`" in page
    assert "[one page](page.html)" in page


def test_rows_of_no_table_are_shown_too(out: Path) -> None:
    figures = {"all": 50.0, "base": 51.0, "novel": 52.0, "avg": 51.5}
    other = [
        ("score-fusion-branchout", "avg", row("ours", "avg", **figures)),
        ("score-fusion-paper", "all", row("theirs", "all", **figures)),
        ("homemade", "plain", row("home|made <b>", "plain", **figures)),
    ]
    write(out, other, Path("toys/disjoint-40-split2/resnet10"))
    page = markdown(report(out, "toys"), str(out))
    table = page.split("## disjoint-40-split2, ResNet10: other classes drawn (split 2)")[1].split("## Misprints")[0]
    assert table.count(".json)") == 3
    assert "home\\|made \\<b\\>" in table
    write(out, other[:1], Path("plants/disjoint-8+2/resnet10"))
    page = markdown(report(out, "plants"), str(out))
    assert "claims" not in page  # nothing here is about them
    assert "Table 1" not in page.replace("`", "").split("## disjoint-8+2")[1]


def test_a_dataset_without_rows_is_answered_with_those_that_have_some(out: Path) -> None:
    with pytest.raises(BranchoutError, match=r"holds no rows of 'cars'; there are: toys"):
        report(out, "cars")
    place = out / PLACE / "bic-plain.json"
    whole = json.loads(place.read_text())
    for told in ("{", "[]", json.dumps({**whole, "metrics": {"all": "x"}}), json.dumps({**whole, "metrics": []})):
        place.write_text(told)
        with pytest.raises(BranchoutError, match=r"bic-plain\.json cannot be read as a row \("):
            read(out)


def test_the_exemplars_are_those_that_rows_name(out: Path) -> None:
    assert "8 + 2 classes, 10 exemplars a class; base model" in markdown(report(out, "toys"))
    for settings, told in (({"exemplars": 10, "total": 8}, ", 8 exemplars in total;"), (None, "8 + 2 classes; base")):
        for place in (out / PLACE).glob("*.json"):
            row = {**json.loads(place.read_text()), "settings": settings}
            if settings is None:
                row.pop("base_model")
            place.write_text(json.dumps(row))
        assert told in markdown(report(out, "toys"))


def test_a_row_of_an_earlier_version_is_marked_and_says_why(out: Path) -> None:
    assert "†" not in markdown(report(out, "toys"))
    place = out / PLACE / "bic-plain.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "outdated": "its bias layer was mended"}))
    text = markdown(report(out, "toys"))
    assert re.search(r"^\| BiC † \|.* 58\.1 \|", text, re.MULTILINE)
    assert "† To be measured again, because since then: its bias layer was mended." in text
    assert "LwF †" not in text


def test_misprints_are_named_by_the_papers_tables() -> None:
    told = dict(misprints())
    assert len(told) == 3
    assert "printed 82.50" in told["Table 1, ResNet18, score fusion best-Acc_avg, novel"]


def test_every_table_has_a_number_for_every_network_it_is_measured_with() -> None:
    assert all(paper_number(table.name, arch) for table in tables().values() for arch in table.archs)


def test_a_network_that_the_paper_has_not_stands_beside_its_table_and_is_judged_by_no_claim(tmp_path: Path) -> None:
    figures = {"all": 50.0, "base": 51.0, "novel": 52.0, "avg": 51.5}
    place = Path("tiny-imagenet-200/disjoint-40")
    write(tmp_path, [("ncm", "plain", row("ncm", "plain", **figures))], place / "resnet10")
    short = "As Table 3, with ViT-Tiny"
    page = markdown(report(tmp_path, "tiny-imagenet-200"))
    assert f"- {short}: not measured yet; `branchout bench disjoint-40 --arch vit_tiny --data DIR`" in page
    names = ("aper", "joint")
    write(tmp_path, [(name, "plain", row(name, "plain", **figures)) for name in names], place / "vit_tiny")
    found = report(tmp_path, "tiny-imagenet-200")
    assert [section.short for section in found.sections] == ["Table 3, ResNet10", short]
    section = found.sections[1]
    assert section.cases == ()
    assert not any(case.arch == "vit_tiny" for check in found.claims for case in check.cases)
    assert "APER with adapters" not in section.missing
    assert "SimpleCIL, all base images" in section.missing
    for text in (markdown(found), html(found, "..", {})):
        told = text.split(f"{short}: Routing and fusion, disjoint classes")[-1]
        told = told.split("## " if "## " in told else "</section>")[0]
        assert "The paper has no numbers for this network." in told
        assert "bench disjoint-40 --arch vit_tiny" in told
        assert "paper all" not in told
        assert ">the paper<" not in told
        assert "APER with adapters" in told


def test_text_that_looks_like_markup_is_text() -> None:
    assert plain("a|b <i> [x](y) `c` *d*") == r"a\|b \<i\> \[x\](y) \`c\` \*d\*"


@pytest.mark.parametrize(
    ("dataset", "command"),
    [
        ("tiny-imagenet-200", "branchout bench sota --arch resnet10 --data DIR"),
        ("glyphs", "branchout bench sota --data glyphs"),
    ],
)
def test_a_table_tells_what_to_type_for_it(dataset: str, command: str) -> None:
    assert Section(dataset, table_named("sota"), "resnet10", "1", ()).command == command


def test_halves_that_choose_for_each_other_have_a_table_of_their_own(out: Path) -> None:
    scored = {**row("bic", "dial-all", all=58.0), "two_fold": {"all": 59.94, "balanced": 61.0, "avg": 63.85}}
    write(out, [("bic", "dial-all", scored)])
    page = markdown(report(out, "toys"))
    (block,) = re.findall(r"chooses for the other: 1 methods.*?</details>", page.split("## Table 3")[0], re.DOTALL)
    assert "|  | all in turn | balanced in turn | avg in turn | file |" in block
    assert "| BiC with the dial | 59.9 | 61.0 | 63.9 |" in block


def test_rows_of_another_base_are_marked(out: Path) -> None:
    assert "‡" not in markdown(report(out, "toys"))
    write(out, [("lwf", "plain", {**row("lwf", "plain", all=40.9, avg=57.7), "base_model": 61.5})])
    page = markdown(report(out, "toys"))
    assert "base model 60.0, 61.5 on its own classes" in page
    assert "‡ Measured with another training of the base model." in page
    assert re.findall(r"^\| ([^|]+) ‡ \|", page, re.MULTILINE) == ["LwF"]


@pytest.mark.parametrize(("value", "shown"), [(62.15, "62.2"), (62.65, "62.7"), (10.65, "10.7"), (61.053, "61.1")])
def test_halves_are_rounded_as_on_paper(value: float, shown: str) -> None:
    assert number(value) == shown


def test_every_row_that_the_paper_has_is_made_by_some_method_of_the_table() -> None:
    labels = {
        "fine-tuning": "finetune", "LwF": "lwf", "iCaRL": "icarl", "BiC": "bic", "WA": "wa", "DER w/o P": "der",
        "PODNet": "podnet", "RM": "rainbow", "joint learning (oracle)": "joint", "pre-trained model": "pretrained",
        "confidence-based routing": "confidence-routing", "learning-based routing w/ L_rt-bal": "learned-routing",
        "oracle routing w/ L_rt-bal": "oracle-routing", "FeatCat+RT": "featcat-rt", "LogitCat+RT": "logitcat-rt",
        "LogitCat+FT": "logitcat-ft", "FA+BiC": "fa-bic", "FA+WA": "fa-wa",
        "logit concatenation (avg pool)": "logitcat-average", "logit concatenation (max pool)": "logitcat-max",
    }  # fmt: skip
    for entry, content in paper().items():
        if entry.startswith("_"):
            continue
        name = next(table for table in sorted(tables(), key=len, reverse=True) if entry.startswith(table))
        taking_part = table_named(name).of(content["backbone"])
        for label in content["rows"]:
            if "score fusion" in label:
                part = next((p for p in ("fc", "layer3", "conv2") if p in label), "")
                wanted = f"score-fusion{'-' + part if part else ''}-reference"
            else:
                wanted = labels[label]
            assert wanted in taking_part, (entry, label)
