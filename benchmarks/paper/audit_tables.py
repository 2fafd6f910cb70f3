"""The audit of the tables: the first screen, one page for each table, the photos, the recipe and the speeds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.audit import GOALS, HEADINGS, LINK, Audit, compared, mean, rounded, shown, tables_of, with_sign

ORACLES = ("oracle-routing", "joint")
"""Beside the methods whose names end with -all, which see all old images."""
OURS_ON_PHOTOS = ("default", "blocks.5", "fc", "no-memory", "two-steps", "five-steps")
SCREEN = {
    "180 + 20 classes": "disjoint-40/resnet10",
    "180 + 20, ResNet18": "disjoint-40/resnet18",
    "180 + 20, ResNet50": "disjoint-40/resnet50",
    "160 + 40": "disjoint-200/resnet10",
    "141 objects + 20 animals": "branch-depth/resnet10",
    "100 + 10 × 10": "multistep/resnet10",
    "100 + 10 × 10, ResNet18": "multistep/resnet18",
    "180 + 15 new, 5 old in a new style": "overlap-style/resnet10",
    "180 + 15 new, 5 old, halves at random": "overlap-random-shuffled/resnet10",
    "180 + 15 new, 5 old, halves by cluster": "overlap-random-clustered/resnet10",
    "180 + 20 old, halves by cluster": "overlap-full/resnet10",
}
NOT_SHOWN = {
    "180 + 20, vision transformer": "disjoint-40/vit_tiny",
    "180 + 20, split 2": "disjoint-40-split2/resnet10",
    "180 + 20, split 3": "disjoint-40-split3/resnet10",
    "180 + 20, no exemplars": "disjoint-40-exemplars0/resnet10",
    "180 + 20, 5 exemplars": "disjoint-40-exemplars5/resnet10",
    "180 + 20, 20 exemplars": "disjoint-40-exemplars20/resnet10",
    "141 objects + 15 animals, 5 old, halves at random": "overlap-domain-shuffled/resnet10",
    "141 objects + 15 animals, 5 old, halves by cluster": "overlap-domain-clustered/resnet10",
    "180 + 20 old, halves by cluster, ResNet18": "overlap-full/resnet18",
}
CHARACTERS = {
    "800 + 40 characters": "disjoint-40/resnet10",
    "800 + 40 characters, no exemplars": "disjoint-40-exemplars0/resnet10",
    "800 + 40 characters, 5 exemplars": "disjoint-40-exemplars5/resnet10",
    "800 + 40 characters, 20 exemplars": "disjoint-40-exemplars20/resnet10",
    "800 + 200 characters": "disjoint-200/resnet10",
    "893 + 40 characters of another domain": "branch-depth/resnet10",
    "500 + 10 × 50 characters": "multistep/resnet10",
    "800 + 35 new, 5 old characters in a new style": "overlap-style/resnet10",
    "800 + 35 new, 5 old characters, halves at random": "overlap-random-shuffled/resnet10",
    "800 + 35 new, 5 old characters, halves by cluster": "overlap-random-clustered/resnet10",
    "893 + 35 new, 5 old characters of another domain, halves at random": "overlap-domain-shuffled/resnet10",
    "893 + 35 new, 5 old characters of another domain, halves by cluster": "overlap-domain-clustered/resnet10",
    "800 + 40 old characters, halves by cluster": "overlap-full/resnet10",
}
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
    definitions(audit, audit.docs / "results" / "definitions.md")
    one_seed(audit, audit.docs / "results" / "definitions.md")
    screen(audit, audit.docs / "results.md")
    margins(audit, audit.docs / "results" / "margins.md")


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
    for key, told in audit.paper["_errata"].items():
        name, *rest = key.split(" / ")
        entry = audit.paper[name]
        start = [entry["what"].split(":")[0], entry["backbone"].replace("resnet", "ResNet"), *rest]
        audit.same(page.name, str(f"- {', '.join(start)}: {told}\n" in text), "True")


def one_seed(audit: Audit, page: Path) -> None:
    """The list of lines with one seed: those of the table pages, whose tables it names by their numbers."""
    expected = set()
    for path in page.parent.glob("table-*.md"):
        for title, _, lines in tables_of(path):
            for line in lines:
                row = audit.rows[audit.file_of(path, LINK.findall(line[0])[0][1])] if LINK.search(line[0]) else None
                if row and row["method"] != "pretrained":
                    shared = " (one stage I for all exemplar seeds)" if row.get("stage1_per_seed") is False else ""
                    where = title.split(", samples")[0], path.stem.split("-")[1]
                    if shared or len(row["seeds"]) == 1:
                        expected.add((*where, row["label"] + shared))
    text = page.read_text(encoding="utf-8").replace("\\", "")
    listed = re.findall(r"^- (.+), Table (\d+)[ab]?: (.+)\.$", text, re.MULTILINE)
    found = {(where, number, name) for where, number, names in listed for name in names.split("; ")}
    audit.same(f"{page.name}, one seed", str(sorted(found)), str(sorted(expected)))


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


def screen(audit: Audit, page: Path) -> None:
    """The first screen: the files of each line, and the sentences."""
    ((_, _, lines),) = tables_of(page)
    pairs: dict[str, list[tuple[Path, Path]]] = {"recipe": [], "other": [], "joint": []}
    for line in lines:
        name = LINK.findall(line[0])[0][0]
        found = [audit.linked(f"{page.name}, {name}", page, cell, "balanced") for cell in line[1:]]
        expected = who(audit, name)
        audit.same(f"{page.name}, {name}", str(found), str(expected))
        ours, reference, rival, joint = found
        if rival:
            row = audit.rows[rival]
            audit.same(
                f"{page.name}, {name}", line[3].partition(")")[2].strip(" †‡").replace("\\", ""),
                row.get("label") or row["method"].replace("-", " "),
            )  # fmt: skip
        for key, pair in unmarked(audit, ours, reference, rival, joint).items():
            pairs[key].append(pair)
    first = audit.rows[flowers(audit)]
    classes = (f"{first['base_classes']:,} ImageNet classes", f"{first['novel_classes']} flowers")
    names = [LINK.findall(line[0])[0][0] for line in lines]
    audit.same(page.name, str(names), str([" + ".join(classes), *SCREEN]))
    text = page.read_text(encoding="utf-8")
    figures = (first["metrics"]["novel"], first["before"], first["metrics"]["base"])
    place = "two CPU cores" if first["hardware"].endswith("threads") else "a GPU"
    told = "1. On {} a network with {} learns {} from 15 photos each: ".format(place, *classes)
    told += "new classes reach {}%, old ones go from {}% to {}%.".format(*map(rounded, figures))
    audit.same(f"{page.name}, first sentence", str(told in LINK.sub(r"\1", text)), "True")
    bases = [audit.rows[path]["base_model"] for name in SCREEN if (path := who(audit, name)[0])]
    told = f"the bases have {rounded(min(bases))}–{rounded(max(bases))}% (flowers: {rounded(first['before'])}%)"
    audit.same(f"{page.name}, bases", str(told in " ".join(text.split())), "True")
    for words, key in (
        (r"^2\. .+ the paper's recipe in", "recipe"), (r"\), in", "other"), ("is above Branchout in", "joint"),
    ):  # fmt: skip
        sentence = re.search(rf"{words} (.+?)(?: \(\[margins\]\(.+\)|; without the dial .+)?\.$", text, re.MULTILINE)
        audit.same(f"{page.name}, sentence on {key}", sentence[1] if sentence else "", lead(audit, pairs[key]))
    plain = [
        (mean(audit.rows[alone], "balanced") or 0) > (mean(audit.rows[ours], "balanced") or 0)
        for name in SCREEN
        if (ours := who(audit, name)[0]) and (alone := ours.with_name("joint-plain.json")) in audit.rows
    ]
    told = f"; without the dial it is above in {sum(plain)} of {len(plain)}."
    audit.same(f"{page.name}, joint training without the dial", str(told in text), "True")
    not_shown = " ".join(text.partition("\nNot shown: ")[2].split("\n\n")[0].split())
    leads = re.findall(r"(?:recipe|method) in (.+?) excludes zero", not_shown)
    rest = [
        lead(audit, [each[key] for name in names if key in (each := unmarked(audit, *who(audit, name)))])
        for names in (NOT_SHOWN, CHARACTERS)
        for key in ("recipe", "other")
    ]
    audit.same(f"{page.name}, scenarios not shown", str([f"{each} excludes zero" for each in leads]), str(rest))
    numbered = re.findall(r"^(\d)\. ", text, re.MULTILINE)
    audit.same(page.name, "".join(numbered), "12345")


def unmarked(
    audit: Audit, ours: Path | None, reference: Path | None, rival: Path | None, joint: Path | None
) -> dict[str, tuple[Path, Path]]:
    """The comparisons of a line that the sentences count."""
    found = {}
    for key, pair in (("recipe", (ours, reference)), ("other", (ours, rival)), ("joint", (joint, ours))):
        used = [*pair, *(twins(audit, rival) if key == "other" and rival else [])]
        if pair[0] and pair[1] and not any(audit.marks(path) for path in used if path):
            found[key] = (pair[0], pair[1])
    return found


def margins(audit: Audit, page: Path) -> None:
    """Every margin with its interval: of the scenarios on the first screen, and of the others."""
    found_lines = [line for _, _, lines in tables_of(page) for line in lines]
    ((_, _, shown),) = tables_of(audit.docs / "results.md")
    names = [LINK.findall(line[0])[0][0] for line in found_lines]
    expected_names = [*(LINK.findall(line[0])[0][0] for line in shown), *NOT_SHOWN, *CHARACTERS]
    audit.same(page.name, str(names), str(expected_names))
    near = 0
    for name, line in zip(names, found_lines, strict=True):
        found = unmarked(audit, *who(audit, name))
        for key, cell in zip(("recipe", "other", "joint"), line[1:], strict=True):
            expected = "–"
            if key in found:
                first, second = (audit.rows[path] for path in found[key])
                margin, low, high = compared(first, second, "balanced")
                shown_margin = f"**{with_sign(margin)}**" if low > 0 else with_sign(margin)
                expected = f"{shown_margin} ({with_sign(low)} to {with_sign(high)})"
                near += 0 < low < 0.05
            if key == "other" and key in found:
                rival = found[key][1]
                label = audit.rows[rival].get("label") or audit.rows[rival]["method"].replace("-", " ")
                audit.same(f"{page.name}, {name}, best", str(files_of(audit, page, cell)), str([rival]))
                cell, expected = LINK.sub(r"\1", cell).replace("\\", ""), f"{expected} {label}"
            audit.same(f"{page.name}, {name}, {key}", cell, expected)
    audit.same(page.name, str(f" {near} of the bold intervals start" in page.read_text(encoding="utf-8")), "True")


def files_of(audit: Audit, page: Path, cell: str) -> list[Path]:
    return [audit.file_of(page, target) for _, target in LINK.findall(cell)]


def flowers(audit: Audit) -> Path:
    """The row of the first line: that of the GPU, unless it is marked and the one of two cores is not."""
    gpu, cpu = (Path("imagenet-flowers", name) for name in ("default.json", "default-cpu.json"))
    return cpu if audit.marks(gpu) and cpu in audit.rows and not audit.marks(cpu) else gpu


def who(audit: Audit, name: str) -> list[Path | None]:
    """Whose files a line of the first screen must show."""
    if name not in SCREEN | NOT_SHOWN | CHARACTERS:
        folder = Path("imagenet-flowers")
        others = [
            path for path in audit.rows if path.parent == folder and audit.rows[path]["method"] not in OURS_ON_PHOTOS
        ]
        return [flowers(audit), None, best(audit, others), None]
    dataset = "glyphs" if name in CHARACTERS else "tiny-imagenet-200"
    folder = Path(dataset, (SCREEN | NOT_SHOWN | CHARACTERS)[name])
    others = []
    for path, row in audit.rows.items():
        method = path.stem.removesuffix(f"-{row.get('point')}")
        if path.parent == folder and row["point"] in ("plain", "dial-balanced") and not row.get("recipe"):
            others += [path] if method not in ORACLES and not method.endswith("-all") else []
    stems = ("score-fusion-branchout-balanced", "score-fusion-reference-balanced", "joint-dial-balanced")
    ours, reference, joint = (path if (path := folder / f"{stem}.json") in audit.rows else None for stem in stems)
    return [ours, reference, best(audit, others), joint]


def twins(audit: Audit, path: Path) -> list[Path]:
    """The rows of a method with the dial and without."""
    if audit.rows[path].get("scenario") == "photos":
        return []
    method = path.stem.removesuffix("-plain").removesuffix("-dial-balanced")
    both = [path.with_name(f"{method}-{point}.json") for point in ("plain", "dial-balanced")]
    return [each for each in both if each in audit.rows]


def best(audit: Audit, paths: Sequence[Path]) -> Path | None:
    return max(paths, key=lambda path: mean(audit.rows[path], "balanced") or 0) if paths else None


def lead(audit: Audit, pairs: Sequence[tuple[Path, Path]]) -> str:
    if not pairs:
        return "0 of 0 scenarios"
    found = [compared(audit.rows[first], audit.rows[second], "balanced") for first, second in pairs]
    margins, clear = [margin for margin, _, _ in found], sum(low > 0 for _, low, _ in found)
    return (
        f"{sum(margin > 0 for margin in margins)} of {len(margins)} scenarios, by {with_sign(min(margins))} to "
        f"{with_sign(max(margins))} points; in {clear} the 95% interval excludes zero"
    )
