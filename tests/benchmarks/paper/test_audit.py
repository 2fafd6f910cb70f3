"""The audit finds nothing on the pages as they are, and finds one changed digit."""

import ast
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from measured import ROOT

from benchmarks.paper.audit import Audit

FILES = sorted((ROOT / "benchmarks" / "paper").glob("audit*.py"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name in ("docs", "results", "benchmarks/paper"):
        shutil.copytree(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def files(copy: Path) -> dict[Path, Any]:
    """The files of the copy, read once."""
    return Audit(copy).files


def test_every_cell_is_that_of_its_file() -> None:
    found = Audit(ROOT).run()
    assert found.faults == [], "type: python -m benchmarks.paper"
    assert found.cells > 30_000
    assert found.links > 1_000


CHANGES = [
    ("results.md", r"\[6(\d)\.\d ± "),
    ("results.md", r"new classes reach \[(9)"),
    ("results.md", r"in (\d) the 95% interval"),
    ("results.md", r"even without the dial it is above Branchout in (\d)"),
    ("results.md", r"with (2) kept images"),
    ("results.md", r"none was: new classes reach \[\d\d\.(\d)\]"),
    ("results.md", r"largest margin is in \*(1)80 \+ 20, ResNet50\*"),
    ("results.md", r"among (\d) other methods"),
    ("results.md", r"second largest is \d\.(\d)"),
    ("results.md", r"In (\d) of these scenarios no other method"),
    ("results.md", r"\) WA \((\d)\d\)"),
    ("results.md", r"claims\]\(\S+\), (\d) hold on"),
    ("results.md", r"the bases have (4)"),
    ("results/margins.md", r"recipe in (\d) of \d scenarios.+ above the best"),
    ("results/margins.md", r"joint-(d)ial-balanced"),
    ("results/margins.md", r"(\d)\) \[joint\]\(\S+joint-plain"),
    ("figures/overview.svg", r'x="(\d)\S+" y="\S+" style="fill: #0072b2"'),
    ("figures/overview.svg", r'y="(\d)\S+" style="fill: #b34a00"'),
    ("figures/overview.svg", r">(B)ranchout</text>"),
    ("figures/overview.svg", r">180 \+ 20, ResNet(1)8</text>"),
    ("figures/overview.svg", r'y="\S+" style="fill: #(0)072b2"'),
    ("results.md", r"the paper's (r)ecipe \|"),
    ("results/margins.md", r"\| (j)oint training − Branchout"),
    ("results/definitions.md", r"that of ResNet50 for (2)0"),
    ("results/margins.md", r"(\d) of the bold intervals"),
    ("results/margins.md", r"\) \[FA\+(B)iC"),
    ("results/margins.md", r"\| \d\.(\d) \("),
    ("results/margins.md", r"to (\d)\.\d\)"),
    ("results/claims.md", r"\| −2\.(\d) \|"),
    ("results/claims.md", r"to −0\.(\d) \|"),
    ("results/claims.md", r"\[(7)1\.5\]"),
    ("results/cases.md", r"\| (\d)\.\d to \d"),
    ("results/photos.md", r"\| 9(\d)\.\d ± "),
    ("results/photos.md", r" ± 0\.(\d) "),
    ("results/table-1.md", r"\| 6\d\.(\d) \|"),
    ("results/table-1.md", r"\| (3)0\.3 \|"),  # of the paper
    ("results/table-2.md", r"base model (\d)"),
    ("results/table-5.md", r"\[(\d)\d\.\d ± \d\.\d\]\(\S+dial-avg"),
    ("results/table-9.md", r"joint-(p)lain"),
    ("results/recipe.md", r"\[(6)\d\.\d ± "),
    ("results/speed.md", r"\[0\.0(6)9\]"),
    ("results/definitions.md", r"printed (8)2"),
    ("results/definitions.md", r"table-9\.md\) by 0\.(\d)"),
    ("results/definitions.md", r"FOSTER, (M)EMO \("),
    ("results/definitions.md", r"Table 6: fine-tuning; iCaRL; (R)M"),
    ("results/definitions.md", r"ResNet18, Table (7): joint"),
    ("results/definitions.md", r"Table (1): RM"),
    ("results/definitions.md", r"Figure 2: (\d)"),
    ("results/definitions.md", r"(6)4\.1 and 44\.3"),
    ("results/rows.csv", r",(6)1\.02?,|,(6)1\.0,"),
    ("results/rows.html", r'"(6)1\.0"'),
]


@pytest.mark.parametrize(("name", "pattern"), CHANGES)
def test_one_changed_digit_is_found(name: str, pattern: str, copy: Path, files: dict[Path, Any]) -> None:
    page = copy / "docs" / name
    text = page.read_text(encoding="utf-8")
    found = re.search(pattern, text)
    assert found, pattern
    place = found.start(found.lastindex or 1)
    other = str((int(text[place]) + 1) % 10) if text[place].isdigit() else "x"
    page.write_text(text[:place] + other + text[place + 1 :], encoding="utf-8")
    try:
        assert faults(copy, files)
    finally:
        page.write_text(text, encoding="utf-8")


def faults(root: Path, files: dict[Path, Any]) -> bool:
    """Whether the audit complains; a page that it cannot read counts too."""
    try:
        return bool(Audit(root, files=files).run().faults)
    except (KeyError, ValueError, IndexError):
        return True


def test_the_copy_is_in_order_so_that_only_the_digit_is_found(copy: Path) -> None:
    assert Audit(copy).run().faults == []


@pytest.mark.parametrize("change", ["metrics", "per_seed", "std", "stage1_per_seed", "superseded"])
def test_a_changed_file_is_found(change: str, copy: Path) -> None:
    path = copy / "results/tiny-imagenet-200/disjoint-40/resnet10/score-fusion-branchout-balanced.json"
    text = path.read_text(encoding="utf-8")
    row = json.loads(text)
    if change == "metrics":
        row["metrics"]["novel"] += 1
    elif change == "per_seed":
        row["per_seed"][0]["novel"] += 1
    elif change == "std":
        row["std"]["novel"] *= math.sqrt(2 / 3)  # as if it divided by n
    elif change == "stage1_per_seed":
        row["stage1_per_seed"] = False
    else:
        row["superseded"] = "another dial"
    path.write_text(json.dumps(row), encoding="utf-8")
    try:
        assert Audit(copy).run().faults
    finally:
        path.write_text(text, encoding="utf-8")


def test_it_shares_no_code_with_the_pages() -> None:
    assert len(FILES) == 6
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name == "benchmarks.paper" or name.startswith("benchmarks.paper.audit")
                assert own or name.split(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"
