"""The page is the rows: every number leads to its file, and claims are judged by them."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from branchout.bench.claims import checks
from branchout.bench.figures import draw
from branchout.bench.report import lines, markdown, paper_label, paper_rows, read
from branchout.bench.tables import table_named
from branchout.errors import BranchoutError

PLACE = Path("toys/disjoint-40/resnet10")


def row(contender: str, point: str, **figures: float) -> dict[str, Any]:
    names = ("all", "base", "novel", "overlap", "avg", "incremental", "avg_steps")
    return {
        "dataset": "toys", "table": "disjoint-40", "point": point, "method": contender, "base_classes": 8,
        "novel_classes": 2, "overlap_classes": 0, "steps": 1, "base_model": 60.0, "hardware": "an abacus",
        "label": contender, "metrics": {name: figures.get(name) for name in names},
    }  # fmt: skip


def write(out: Path, rows: list[tuple[str, str, dict[str, Any]]], place: Path = PLACE) -> None:
    (out / place).mkdir(parents=True, exist_ok=True)
    for contender, point, content in rows:
        (out / place / f"{contender}-{point}.json").write_text(json.dumps(content))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    measured = {
        ("score-fusion-reference", "all"): {"all": 61.0, "base": 62.0, "novel": 55.0, "avg": 58.5},
        ("score-fusion-reference", "avg"): {"all": 57.0, "base": 56.0, "novel": 72.0, "avg": 64.0},
        ("joint", "plain"): {"all": 61.5, "base": 61.0, "novel": 63.0, "avg": 62.0},
        ("joint", "dial-avg"): {"all": 59.0, "base": 58.0, "novel": 75.0, "avg": 66.5},
        ("bic", "plain"): {"all": 58.1, "base": 58.4, "novel": 56.2, "avg": 57.3},
        ("lwf", "plain"): {"all": 40.9, "base": 36.7, "novel": 78.6, "avg": 57.7},
        ("logitcat-ft", "plain"): {"all": 56.0, "base": 56.0, "novel": 56.0, "avg": 56.0},
        ("logitcat-rt", "plain"): {"all": 55.0, "base": 55.0, "novel": 57.0, "avg": 56.5},
    }
    write(tmp_path, [(name, point, row(name, point, **figures)) for (name, point), figures in measured.items()])
    return tmp_path


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
    ("table", "contender", "point", "label"),
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
def test_rows_bear_the_papers_names_where_it_has_them(
    table: str, contender: str, point: str, label: str | None
) -> None:
    assert paper_label(table, contender, point) == label
    if label:
        assert label in paper_rows(table, "resnet10")


def test_every_number_of_ours_links_to_the_file_that_holds_it(out: Path) -> None:
    page = markdown(out, "toys", str(out))
    found = 0
    for line in page.splitlines():
        link = re.search(r"\]\((\S+\.json)\)", line)
        if link:
            metrics = json.loads(Path(link.group(1)).read_text())["metrics"]
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            shown = cells[-5:-1]
            assert shown == [f"{metrics[name]:.1f}" for name in ("all", "base", "novel", "avg")]
            found += 1
    assert found >= 8


def test_claims_are_judged_by_the_rows(out: Path) -> None:
    verdicts = {check.claim: check for check in checks("toys", read(out))}

    def verdict(part: str) -> str:
        return next(check.verdict for claim, check in verdicts.items() if part in claim).strip("*")

    assert verdict("within one point") == "holds"
    assert verdict("Best-avg is above") == "holds"
    assert verdict("above every compared method, in") == "not measured"  # iCaRL and others are missing
    rest = [(name, "plain", row(name, "plain", all=50.0, avg=50.0)) for name in ("finetune", "icarl", "wa", "der")]
    write(out, rest)
    verdicts = {check.claim: check for check in checks("toys", read(out))}
    assert verdict("above every compared method, in") == "holds"
    assert verdict("Fine-tuned heads") == "does not hold"  # better in all, worse in avg
    assert verdict("ResNet18") == "not measured"
    assert verdict("Max pooling") == "not measured"
    write(out, [("lwf", "plain", row("lwf", "plain", all=61.2, base=60.0, novel=66.0, avg=63.0))])
    verdicts = {check.claim: check for check in checks("toys", read(out))}
    assert verdict("above every compared method, in") == "does not hold"
    write(out, [("joint", "plain", row("joint", "plain", all=62.1, base=61.0, novel=63.0, avg=64.5))])
    verdicts = {check.claim: check for check in checks("toys", read(out))}
    assert verdict("within one point") == "does not hold"
    assert verdict("Best-avg is above") == "does not hold"


def test_alpha_and_beta_are_judged_by_the_whole_grid(out: Path) -> None:
    curve = [{"alpha": a / 5, "beta": b / 5, "novel": 50.0 + a - b} for a in range(6) for b in range(6)]
    content = row("score-fusion-reference", "all", all=61.0, base=62.0, novel=55.0, avg=58.5)
    for turned, expected in ((1, "holds"), (-1, "does not hold")):
        bent = [{**point, "novel": turned * point["novel"]} for point in curve]
        write(out, [("score-fusion-reference", "all", {**content, "curve": bent})])
        found = next(check for check in checks("toys", read(out)) if check.claim.startswith("Raising α"))
        assert found.verdict.strip("*") == expected


def test_a_dataset_without_rows_is_answered_with_those_that_have_some(out: Path) -> None:
    with pytest.raises(BranchoutError, match=r"holds no rows of 'cars'; there are: toys"):
        markdown(out, "cars")
    (out / PLACE / "bic-plain.json").write_text("{")
    with pytest.raises(BranchoutError, match=r"bic-plain\.json cannot be read as a row"):
        read(out)


def test_figures_are_drawn_from_rows_alone_and_only_where_there_are_some(out: Path, tmp_path: Path) -> None:
    assert draw(out, "toys", tmp_path / "figures") == []
    curve = [
        {"alpha": a / 5, "beta": b / 5, "base": 60.0 - a, "novel": 50.0 + a - b} for a in range(6) for b in range(6)
    ]
    dial = [{"b": float(n), "base": 62.0 - n, "novel": 40.0 + 3 * n} for n in range(9)]
    for name, points in (("score-fusion-reference", curve), ("score-fusion-branchout", dial)):
        write(out, [(name, "all", {**row(name, "all", all=61.0, base=62.0, novel=55.0, avg=58.5), "curve": points})])
    for count in (4, 8):
        for where in ("fc", "layer4", "stem"):
            content = {**row(f"alone-{where}", "alone", novel=70.0 + count), "base_classes": count, "novel_alone": 70.0}
            write(out, [(f"alone-{where}", "alone", content)], Path(f"toys/base-classes-{count}/resnet10"))
    drawn = draw(out, "toys", tmp_path / "figures")
    assert [path.stem for path in drawn] == ["fig-base-classes", "fig-finetune-depth", "fig-design-space"]
    first = [path.read_text() for path in drawn]
    for text in first:
        assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "4 base classes" in first[1]
    assert "8 base classes" in first[1]
    assert "the dial" in first[2]
    assert [path.read_text() for path in draw(out, "toys", tmp_path / "figures")] == first
    page = markdown(out, "toys", str(out), [path.relative_to(tmp_path) for path in drawn])
    assert page.count("![") == 3


def test_what_fine_tuning_brings_is_judged_by_the_number_of_base_classes(out: Path) -> None:
    def judged(gaps: dict[int, float], deeper: float) -> list[str]:
        for count, gap in gaps.items():
            for where, value in (("fc", 70.0), ("layer4", 70.0 + gap), ("layer3", deeper), ("stem", 60.0)):
                content = {**row("alone", "alone", novel=value), "base_classes": count, "novel_alone": value}
                write(out, [(f"alone-{where}", "alone", content)], Path(f"toys/base-classes-{count}/resnet10"))
        return [check.verdict.strip("*") for check in checks("toys", read(out))][-2:]

    assert judged({20: 9.0, 180: 3.0}, 72.0) == ["holds", "holds"]
    assert judged({20: 3.0, 180: 9.0}, 80.0) == ["does not hold", "does not hold"]
