"""The audit of the first screen and its margins: whose rows they show, and what the sentences count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.audit import LINK, Audit, compared, mean, rounded, tables_of, with_sign

ORACLES = ("oracle-routing", "joint", "pretrained")
"""They see all old images, as do the methods whose names end with -all, or learn nothing."""
WHOLE_NETWORK = {
    "finetune", "finetune-exemplars", "lwf", "icarl", "bic", "wa", "der", "podnet", "foster", "memo", "rainbow",
    "rainbow-own", "fine-tuning",
}  # fmt: skip
HEADING = [
    "scenario", "**Branchout**", "the paper's recipe", "best other method (of how many)", "joint training, dial",
]  # fmt: skip
MARGINS = [
    "scenario", "Branchout", "Branchout − the paper's recipe", "Branchout − best other method",
    "joint training − Branchout", "joint training without the dial − Branchout",
]  # fmt: skip
FLOWERS = Path("imagenet-flowers")
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


def check(audit: Audit) -> None:
    screen(audit, audit.docs / "results.md")
    margins(audit, audit.docs / "results" / "margins.md")


def screen(audit: Audit, page: Path) -> None:
    """The first screen: the files of each line, and the sentences."""
    ((_, heading, lines),) = tables_of(page)
    audit.same(f"{page.name}, heading", str(heading), str(HEADING))
    pairs: dict[str, list[tuple[Path, Path]]] = {"recipe": [], "other": [], "joint": []}
    without, on_features = [], 0
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
                f"{row.get('label') or row['method'].replace('-', ' ')} ({len(methods_of(audit, name))})",
            )  # fmt: skip
        counted = unmarked(audit, ours, reference, rival, joint)
        for key, pair in counted.items():
            pairs[key].append(pair)
        if "other" in counted:
            on_features += not WHOLE_NETWORK & methods_of(audit, name)
        elif ours and rival:
            marks = {mark for path in (ours, *twins(audit, rival)) for mark in audit.marks(path).split()}
            without.append(f"*{name}* ({', '.join(sorted(marks))})")
    first = audit.rows[flowers(audit)]
    classes = (f"{first['base_classes']:,} ImageNet classes", f"{first['novel_classes']} flowers")
    names = [LINK.findall(line[0])[0][0] for line in lines]
    audit.same(page.name, str(names), str([" + ".join(classes), *SCREEN]))
    text = page.read_text(encoding="utf-8")
    figures = (first["metrics"]["novel"], first["before"], first["metrics"]["base"])
    place = "two CPU cores" if first["hardware"].endswith("threads") else "a GPU"
    told = "1. On {} a network with {} learns {} from 15 photos each, ".format(place, *classes)
    told += f"with {round(first['memory_images'] / first['base_classes'])} kept images of each old class: "
    told += "new classes reach {}%, old ones go from {}% to {}%.".format(*map(rounded, figures))
    audit.same(f"{page.name}, first sentence", str(told in LINK.sub(r"\1", text)), "True")
    others = [audit.rows[Path(name, "default-cpu.json")] for name in ("clip-art", "garments")]
    new, old = (" and ".join(f"{rounded(row['metrics'][part])}%" for row in others) for part in ("novel", "base"))
    (before,) = {rounded(row["before"]) for row in others}
    told = f"With clip art and garments, on two CPU cores, none was: new classes reach {new}, "
    told += f"old ones go from {before}% to {old}."
    audit.same(f"{page.name}, other images", str(told in LINK.sub(r"\1", text)), "True")
    bases = [audit.rows[path]["base_model"] for name in SCREEN if (path := who(audit, name)[0])]
    told = f"the bases have {rounded(min(bases))}–{rounded(max(bases))}% (flowers: {rounded(first['before'])}%)"
    audit.same(f"{page.name}, bases", str(told in " ".join(text.split())), "True")
    for words, key in (
        (r"^2\. .+ the paper's recipe in", "recipe"), (r"\), in", "other"), ("is above Branchout in", "joint"),
    ):  # fmt: skip
        sentence = re.search(rf"{words} (.+? excludes zero)", text, re.MULTILINE)
        audit.same(f"{page.name}, sentence on {key}", sentence[1] if sentence else "", lead(audit, pairs[key]))
    rivals = {who(audit, name)[2]: name for name in names}
    by_margin = [
        (compared(audit.rows[ours], audit.rows[other], "balanced")[0], other) for ours, other in pairs["other"]
    ]
    (second, _), (_, largest) = sorted(by_margin)[-2:]
    name = rivals[largest]
    told = f"The largest margin is in *{name}*, among {len(methods_of(audit, name))} other methods; "
    told += f"the second largest is {with_sign(second)}. In {on_features} of these scenarios no other method that "
    told += "trains the whole network is measured."
    told += f" Not counted: {' and '.join(without)}." if without else ""
    audit.same(f"{page.name}, who is compared", str(told in text), "True")
    plain = [
        (mean(audit.rows[alone], "balanced") or 0) > (mean(audit.rows[ours], "balanced") or 0)
        for name in SCREEN
        for alone, ours in joint_alone(audit, name).values()
    ]
    told = f"; even without the dial it is above Branchout in {sum(plain)} of {len(plain)}."
    audit.same(f"{page.name}, joint training without the dial", str(told in text), "True")
    numbered = re.findall(r"^(\d)\. ", text, re.MULTILINE)
    audit.same(page.name, "".join(numbered), "12345")


def joint_alone(audit: Audit, name: str) -> dict[str, tuple[Path, Path]]:
    """Joint training without the dial, and Branchout, of a line where both are measured and not marked."""
    ours = who(audit, name)[0]
    alone = ours.with_name("joint-plain.json") if ours else None
    if ours is None or alone not in audit.rows or audit.marks(ours) + audit.marks(alone):
        return {}
    return {"joint alone": (alone, ours)}


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
    for _, heading, _ in tables_of(page):
        audit.same(f"{page.name}, heading", str(heading), str(MARGINS))
    ((_, _, shown),) = tables_of(audit.docs / "results.md")
    names = [LINK.findall(line[0])[0][0] for line in found_lines]
    expected_names = [*(LINK.findall(line[0])[0][0] for line in shown), *NOT_SHOWN, *CHARACTERS]
    audit.same(page.name, str(names), str(expected_names))
    text = page.read_text(encoding="utf-8")
    rest = [
        lead(audit, [each[key] for name in names if key in (each := unmarked(audit, *who(audit, name)))])
        for names in (NOT_SHOWN, CHARACTERS)
        for key in ("recipe", "other")
    ]
    leads = re.findall(r"(?:recipe|method) in (.+? excludes zero)", text)
    audit.same(f"{page.name}, sentences", str(leads), str(rest))
    near = 0
    for name, line in zip(names, found_lines, strict=True):
        files = who(audit, name)
        audit.same(
            f"{page.name}, {name}", str(audit.linked(f"{page.name}, {name}", page, line[1], "balanced")), str(files[0])
        )
        found = unmarked(audit, *files)
        found |= joint_alone(audit, name)
        for key, cell in zip(("recipe", "other", "joint", "joint alone"), line[2:], strict=True):
            expected = "–"
            if key in found:
                first, second = (audit.rows[path] for path in found[key])
                margin, low, high = compared(first, second, "balanced")
                shown_margin = f"**{with_sign(margin)}**" if low > 0 else with_sign(margin)
                expected = f"{shown_margin} ({with_sign(low)} to {with_sign(high)})"
                near += 0 < low < 0.05
                other = next(path for path in found[key] if path != files[0])
                label = audit.rows[other].get("label") or audit.rows[other]["method"].replace("-", " ")
                audit.same(f"{page.name}, {name}, {key}", str(files_of(audit, page, cell)), str([other]))
                cell = LINK.sub(r"\1", cell).replace("\\", "")
                expected += f" {label if key == 'other' else key.removesuffix(' alone')}"
            audit.same(f"{page.name}, {name}, {key}", cell, expected)
    audit.same(page.name, str(f" {near} of the bold intervals start" in text), "True")


def files_of(audit: Audit, page: Path, cell: str) -> list[Path]:
    return [audit.file_of(page, target) for _, target in LINK.findall(cell)]


def flowers(audit: Audit) -> Path:
    """The row of the first line: that of the GPU, unless it is marked and the one of two cores is not."""
    gpu, cpu = (FLOWERS / name for name in ("default.json", "default-cpu.json"))
    return cpu if audit.marks(gpu) and cpu in audit.rows and not audit.marks(cpu) else gpu


def others(audit: Audit, name: str) -> dict[Path, str]:
    """The other methods of a scenario, by their files."""
    folder = folder_of(name)
    rows = {path: audit.rows[path] for path in audit.folders[folder]}
    if folder == FLOWERS:
        return {path: row["method"] for path, row in rows.items() if row["method"] not in OURS_ON_PHOTOS}
    points = {
        path: path.stem.removesuffix(f"-{row['point']}")
        for path, row in rows.items()
        if row["point"] in ("plain", "dial-balanced") and not row.get("recipe")
    }
    return {path: method for path, method in points.items() if method not in ORACLES and not method.endswith("-all")}


def methods_of(audit: Audit, name: str) -> set[str]:
    return set(others(audit, name).values())


def folder_of(name: str) -> Path:
    if name not in SCREEN | NOT_SHOWN | CHARACTERS:
        return FLOWERS
    return Path("glyphs" if name in CHARACTERS else "tiny-imagenet-200", (SCREEN | NOT_SHOWN | CHARACTERS)[name])


def who(audit: Audit, name: str) -> list[Path | None]:
    """Whose files a line of the first screen must show."""
    folder, rival = folder_of(name), best(audit, list(others(audit, name)))
    if folder == FLOWERS:
        return [flowers(audit), None, rival, None]
    stems = ("score-fusion-branchout-balanced", "score-fusion-reference-balanced", "joint-dial-balanced")
    ours, reference, joint = (path if (path := folder / f"{stem}.json") in audit.rows else None for stem in stems)
    return [ours, reference, rival, joint]


def twins(audit: Audit, path: Path) -> list[Path]:
    """The rows of a method with the dial and without."""
    if audit.rows[path].get("scenario") == "photos":
        return [path]
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
        f"{sum(margin > 0 for margin in margins)} of {len(margins)} scenarios, margins {with_sign(min(margins))} to "
        f"{with_sign(max(margins))} points; in {clear} the 95% interval excludes zero"
    )
