"""The audit of the tables: one page for each table, the photos, the recipe and the speeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.audit import GOALS, HEADINGS, LINK, Audit, rounded, shown, tables_of

PAPER_NAMES = {
    "score-fusion-reference": "score fusion", "score-fusion-fc-reference": "score fusion fc-only",
}  # fmt: skip
CLONED = {"-layer3": "layer3,4", "": "layer4", "-conv2": "layer4 (conv2 only)", "-fc": "fc-only"}
BEST = {"all": "best-Acc_all", "balanced": "best-balanced", "avg": "best-Acc_avg"}


def check(audit: Audit, pages: Sequence[Path]) -> None:
    for page in pages:
        if page.name.startswith("table-"):
            table_page(audit, page)
    photos(audit, audit.docs / "results" / "photos.md")
    recipe(audit, audit.docs / "results" / "recipe.md")
    speed(audit, audit.docs / "results" / "speed.md")


def table_page(audit: Audit, page: Path) -> None:
    """Each column by its heading, each line by the file that its name leads to."""
    text = page.read_text(encoding="utf-8")
    facts = re.findall(r"^(\d+) \+ (\d+) classes(?:, (\d+) of them old ones)?(?: in (\d+) steps)?(?:, (\d+) exemplars "
                       r"of each class)?; base model ([\d.]+)%\.", text, re.MULTILINE)  # fmt: skip
    found = list(tables_of(page))
    audit.same(page.name, str(len(facts)), str(len(found)))
    for (title, heading, lines), told in zip(found, facts, strict=False):
        files = [audit.file_of(page, LINK.findall(line[0])[0][1]) for line in lines if LINK.search(line[0])]
        row = audit.rows[next((path for path in files if path not in audit.on_other_base), files[0])]
        expected = (
            row["base_classes"], row["novel_classes"], row["overlap_classes"] or "",
            row["steps"] if row["steps"] > 1 else "", row["settings"]["exemplars"], rounded(row["base_model"]),
        )  # fmt: skip
        audit.same(f"{page.name}, {title}", str(told), str(tuple(map(str, expected))))
        audit.same(f"{page.name}, {title}: one folder", str(len({path.parent for path in files})), "1")
        for line in lines:
            table_line(audit, page, dict(zip(heading, line, strict=True)), files[0].parent)


def table_line(audit: Audit, page: Path, line: Mapping[str, str], folder: Path) -> None:
    where = f"{page.name}, {line['']}"
    link = LINK.search(line[""])
    path = audit.file_of(page, link[2]) if link else None
    row = audit.rows[path] if path else None
    told = paper_line(audit, page, path, folder, line[""])
    if path and row and link:
        goal = f": best {row['point']}" if row["point"] in GOALS else ""
        audit.same(
            where, link[1].replace("\\", "") + line[""][link.end() :], f"{row['label']}{goal}{audit.marks(path)}"
        )
    for name, cell in line.items():
        metric = HEADINGS.get(name, name)
        if name.startswith("paper "):
            key = HEADINGS.get(name[6:], name[6:]).replace("parameters", "parameters_millions")
            audit.same(f"{where}, {name}", cell, rounded(told.get(key)))
        elif name.startswith("dial: "):
            other = audit.linked(f"{where}, {name}", page, cell, name[6:])
            stem = path.stem.removesuffix("-plain") if path else ""
            expected = folder / f"{stem}-dial-{name[6:]}.json"
            audit.same(f"{where}, {name}", str(other), str(expected if expected in audit.rows else None))
        elif name:
            audit.same(f"{where}, {name}", cell, shown(row, metric) if row else "–")


def paper_line(audit: Audit, page: Path, path: Path | None, folder: Path, label: str) -> Mapping[str, float]:
    """The paper's numbers beside a line."""
    dataset, experiment, arch = folder.parts
    if dataset != "tiny-imagenet-200" or re.search(r"-(split|exemplars)\d+$", experiment):
        return {}
    name = "sota" if page.stem == "table-1" else experiment
    entries: list[dict[str, Any]] = [audit.paper.get(f"{name}-{arch}") or {}, audit.paper.get(name) or {}]
    rows: dict[str, Any] = next((entry["rows"] for entry in entries if entry.get("backbone") == arch), {})
    if path is None:
        return dict(rows[label.replace("\\", "")])
    row = audit.rows[path]
    method = path.stem.removesuffix(f"-{row['point']}")
    wanted = row["label"] if row["point"] == "plain" else ""
    if row.get("recipe") == "reference" and row["point"] in BEST:
        cloned = CLONED.get(method.removeprefix("score-fusion").removesuffix("-reference"))
        wanted = f"{PAPER_NAMES.get(method)} {BEST[row['point']]}"
        if name == "branch-depth":
            wanted = f"{cloned}: score fusion {BEST[row['point']]}"
    return dict(rows.get(wanted, {}))


def photos(audit: Audit, page: Path) -> None:
    files = []
    for _, heading, lines in tables_of(page):
        for line in lines:
            path = audit.file_of(page, LINK.findall(line[0])[0][1])
            row = audit.rows[path]
            files.append(path)
            audit.same(f"{page.name}, {path}", line[0].partition(")")[2], audit.marks(path))
            for name, cell in zip(heading[1:], line[1:], strict=True):
                expected = shown(row, name)
                if name == "old classes before":
                    expected = rounded(row["before"])
                elif name == "seconds":
                    expected = ", ".join(f"{each:.0f}" for each in row["seconds"])
                audit.same(f"{page.name}, {path}, {name}", cell, expected)
        facts = f"{row['base_classes']:,} + {row['novel_classes']} classes, {row['test_images']:,} test images."
        audit.same(page.name, str(facts in page.read_text(encoding="utf-8")), "True")
    every = [path for path, row in audit.rows.items() if row.get("scenario") == "photos"]
    audit.same(page.name, str(sorted(files)), str(sorted(every)))
    for path, row in audit.files.items():
        if path.parts[0] == "commands":
            (told,) = (line for line in page.read_text(encoding="utf-8").splitlines() if f"/{path})" in line)
            for name in ("check", "extend", "evaluate"):
                seconds, gigabytes = re.findall(rf"`{name}` (\d+) s and ([\d.]+) GB", told)[0]
                audit.same(f"{page.name}, {name}, seconds", seconds, f"{row[name]['seconds']:.0f}")
                memory = round(row[name]["peak_memory_bytes"] / 10**9, 2)
                audit.same(f"{page.name}, {name}, memory", gigabytes, f"{memory:.2f}")
            audit.same(
                f"{page.name}, forecast", told.partition("says “")[2].partition("”")[0], row["check"]["forecast"]
            )


STAGE_ONE = {
    "new images only": "neither",
    "distillation": "no-exemplars",
    "exemplars": "undistilled",
    "**exemplars and distillation (default)**": "ours",
}
"""Rows of the ladder, by what stage I is trained with."""


def recipe(audit: Audit, page: Path) -> None:
    for title, heading, lines in tables_of(page):
        if not heading[1].startswith("best "):  # the numbers are checked with all links; here, that each is its own
            for line in lines:
                targets = [LINK.findall(cell)[0][1].partition("#") for cell in line[1:]]
                keys, files = [key for *_, key in targets], {audit.file_of(page, name).stem for name, *_ in targets}
                where = f"{page.name}, {title}, {line[0]}"
                audit.same(where, str(keys), str([f"two_fold.{goal}" for goal in heading[1:]]))
                audit.same(where, str(files), str({STAGE_ONE[line[0]]}))
            continue
        for line in lines:
            paths = [
                audit.linked(f"{page.name}, {title}, {name}", page, cell, name.removeprefix("best "))
                for name, cell in zip(heading[1:], line[1:], strict=True)
            ]
            points = [path.stem.rsplit("-", 1)[1] for path in paths if path]
            audit.same(f"{page.name}, {title}, {line[0]}", str(points), str([name[5:] for name in heading[1:]]))
    same = {str(row["settings"]["recipe"]) for row in audit.rows.values() if row.get("recipe") == "branchout"}
    audit.same(f"{page.name}: settings of the recipe", str(len(same)), "1")


def speed(audit: Audit, page: Path) -> None:
    ((_, _, lines),) = tables_of(page)
    for line in lines:
        text, target = LINK.findall(line[0])[0]
        row = audit.files[audit.file_of(page, target)]
        ratio = rounded(row["ratio"]) if row["ratio"] >= 1 else f"{row['ratio']:.3f}"
        audit.same(f"{page.name}, {target}", text, ratio)
        told = [row["of"], row["against"], row["hardware"], f"`{row['commit']}`"]
        audit.same(f"{page.name}, {target}", str([cell.replace("\\", "") for cell in line[1:]]), str(told))
