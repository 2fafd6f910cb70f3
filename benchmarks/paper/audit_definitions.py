"""The audit of the page of definitions: reasons for marks, lists of rows, the paper's misprints."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from benchmarks.paper.audit import LINK, Audit, mean, rounded, tables_of


def check(audit: Audit) -> None:
    page = audit.docs / "results" / "definitions.md"
    definitions(audit, page)
    one_seed(audit, page)


def definitions(audit: Audit, page: Path) -> None:
    """Reasons for marked rows with their counts, and the paper's misprints."""
    text = page.read_text(encoding="utf-8").replace("\\", "")
    why = Counter(row.get("superseded") or row.get("outdated") for row in audit.rows.values())
    expected = [f"- {count} row{'s' if count > 1 else ''}: {reason}." for reason, count in why.items() if reason]
    audit.same(page.name, str(sorted(re.findall(r"^- \d+ rows?: .+$", text, re.MULTILINE))), str(sorted(expected)))
    above = []
    for path, row in audit.rows.items():
        other = audit.rows.get(path.with_name(path.name.replace("-paper-", "-reference-")))
        if path.match("tiny-imagenet-200/*/*/score-fusion-paper-balanced.json") and other:
            above.append((mean(row, "balanced") or 0.0) - (mean(other, "balanced") or 0.0))
    above = [margin for margin in above if margin > 0]
    flat = " ".join(text.split())
    found = re.search(r"its balanced accuracy is higher in (.+?) and lower or not", flat)
    by = sorted(re.findall(r"by ([\d.]+)(?:,|$)", found[1] if found else ""))
    audit.same(f"{page.name}, recipe paper", str(by), str(sorted(map(rounded, above))))
    marked = {(str(path.parent), audit.rows[path]["label"]) for path in audit.on_other_base}
    listed = re.findall(r"([^;(]+) \(`([^`]+)`\)", flat.partition("Marked are: ")[2].partition(". ##")[0])
    named = {(folder, name.strip()) for names, folder in listed for name in re.split(r", (?!the dial)", names)}
    audit.same(f"{page.name}, other bases", str(sorted(named)), str(sorted(marked)))
    epochs = {row["arch"]: row["settings"]["pretraining"]["epochs"] for path, row in audit.rows.items()
              if path.match("tiny-imagenet-200/*/*/*.json")}  # fmt: skip
    told = "for {resnet10} epochs, that of ResNet50 for {resnet50}, so".format(**epochs)
    audit.same(f"{page.name}, epochs", str(told in flat and epochs["resnet18"] == epochs["resnet10"]), "True")
    told = "vision transformer for {vit_tiny}.".format(**epochs)
    audit.same(f"{page.name}, epochs", str(told in flat and epochs["resnet10"] == 2 * epochs["resnet50"]), "True")
    steps = audit.paper["multistep-resnet18"]["rows"]
    told = f"in the paper {rounded(steps['PODNet']['incremental'])} and {rounded(steps['BiC']['incremental'])}."
    audit.same(f"{page.name}, the paper's many steps", str(told in flat), "True")
    for key, told in audit.paper["_errata"].items():
        name, *rest = key.split(" / ")
        entry = audit.paper[name]
        start = [entry["what"].split(":")[0], entry["backbone"].replace("resnet", "ResNet"), *rest]
        audit.same(page.name, str(f"- {', '.join(start)}: {told}\n" in text), "True")


def one_seed(audit: Audit, page: Path) -> None:
    """The list of lines with one seed: those of the table pages, whose tables it names by their numbers."""
    expected = []
    for path in page.parent.glob("table-*.md"):
        for title, _, lines in tables_of(path):
            names = set()
            for line in lines:
                row = audit.rows[audit.file_of(path, LINK.findall(line[0])[0][1])] if LINK.search(line[0]) else None
                if row and row["method"] != "pretrained":
                    shared = " (one stage I for all exemplar seeds)" if row.get("stage1_per_seed") is False else ""
                    if shared or len(row["seeds"]) == 1:
                        names.add(row["label"] + shared)
            where = title.split(", samples")[0], path.stem.split("-")[1]
            expected += [(*where, name) for name in names]
    text = page.read_text(encoding="utf-8").replace("\\", "")
    listed = re.findall(r"^- (.+), Table (\d+)[ab]?: (.+)\.$", text, re.MULTILINE)
    found = [(where, number, name) for where, number, names in listed for name in names.split("; ")]
    audit.same(f"{page.name}, one seed", str(sorted(found)), str(sorted(expected)))
    behind = [row for path, row in audit.rows.items() if path.match("*/base-classes-*/*/*.json")]
    few = sum(len(row["seeds"]) == 1 for row in behind)
    audit.same(f"{page.name}, Figure 2", str(f"- Figure 2: {few} of {len(behind)} rows." in text), "True")
    alone = [row for path, row in audit.rows.items() if path.name.startswith("stage-one-dial-")]
    few = sum(len(row["seeds"]) == 1 for row in alone)
    told = f"without deltas, {few} of {len(alone)} rows." in text
    audit.same(f"{page.name}, stage I without deltas", str(told), "True")
