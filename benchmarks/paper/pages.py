"""The pages of results as Markdown. Every number leads to its file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from benchmarks.paper.claims import FIGURES
from benchmarks.paper.claims_pages import cases_page, claims_page
from benchmarks.paper.markdown import Writer, footnotes, plain, table
from benchmarks.paper.paper_numbers import misprints
from benchmarks.paper.rows import GOALS, NAMES, Row, Rows
from benchmarks.paper.screen import margins_page, screen
from benchmarks.paper.tables import (
    DATASETS,
    MEASURED,
    OF_PHOTOS,
    Line,
    Section,
    scenarios,
    scenarios_not_shown,
    sections,
)
from branchout.bench.rows import number
from branchout.bench.tables import BY_BASE, table_named


def table_pages(rows: Rows) -> dict[str, str]:
    found: dict[str, list[Section]] = {}
    for dataset in DATASETS:
        for section in sections(dataset, rows):
            found.setdefault(section.page, []).append(section)
    return {name: table_page(name, shown) for name, shown in found.items()}


def table_page(name: str, shown: Sequence[Section]) -> str:
    write = Writer("../../results")
    title = next((each.table.title for each in shown if each.table.title), "other classes, other numbers of exemplars")
    parts = [f"# Table {name.split('-')[1]}: {title.split(', samples split')[0]}"]
    for section in shown:
        halves = re.search(r"samples split .*", section.table.title)
        heading = section.heading + (f", {halves[0]}" if halves else "")
        base = section.about.data.get("base_model")
        facts = f"{section.facts()}; {'no base model' if base is None else f'base model {number(base)}%'}."
        missing = f". Not measured: {plain('; '.join(section.missing))}." if section.missing else "."
        parts += [f"## {heading}", f"{facts} `{section.command}`{missing}", lines_table(write, section.lines)]
    parts.append("[What the columns mean](definitions.md). *paper*: the numbers of the paper, on ImageNet.")
    return footnotes("\n\n".join(parts))


def lines_table(write: Writer, lines: Sequence[Line]) -> str:
    """The measured columns first, then the same dial for methods that have none of their own, then the paper's."""
    measured = [name for name in MEASURED if any(line.row and line.row.value(name) is not None for line in lines)]
    dial = [goal for goal in GOALS if any(goal in line.dial for line in lines)]
    size = ["parameters"] if any(line.row and line.row.value("parameters") for line in lines) else []
    paper = [name for name in (*MEASURED, "parameters_millions") if any(name in line.paper for line in lines)]
    heading = ["", *(NAMES.get(name, name) for name in measured), *(f"dial: {goal}" for goal in dial)]
    heading += [NAMES[name] for name in size]
    heading += [f"paper {NAMES.get(name.removesuffix('_millions'), name)}" for name in paper]
    body = []
    for line in lines:
        label = write.link(plain(line.label), line.row) + line.row.marks if line.row else plain(line.label)
        cells = [write.value(line.row, name) if line.row else "–" for name in (*measured, *size)]
        cells[len(measured) : len(measured)] = [write.linked(line.dial.get(goal), goal) for goal in dial]
        body.append([label, *cells, *(number(line.paper.get(name)) for name in paper)])
    return table(heading, body)


def commands_part(results: Path, dataset: str, arch: str, write: Writer) -> list[str]:
    """A sentence for each machine on which whole commands were measured."""
    parts = []
    for path in sorted((results / "commands").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["dataset"], data["arch"]) != (dataset, arch):
            continue
        typed = ", ".join(
            f"`{name}` {data[name]['seconds']:.0f} s and {data[name]['peak_memory_bytes'] / 1e9:.2f} GB"
            for name in ("check", "extend", "evaluate")
        )
        parts.append(
            f"[Typed as commands]({write.results}/commands/{quote(path.name)}) on {plain(data['hardware'])}, seconds "
            f"and peak memory: {typed}. `check` says “{plain(data['check']['forecast'])}”."
        )
    return parts


PHOTOS = {"imagenet-flowers": "Flowers", "clip-art": "Clip art", "garments": "Garments"}
"""The sets of images that were added to a network with ImageNet classes, in the order of the page."""


def photos_page(rows: Rows, results: Path) -> str:
    write = Writer("../../results")
    parts = ["# New classes added to an ImageNet network", write.text("photos")]
    order = {name: place for place, name in enumerate(PHOTOS)}
    photos = [row for row in rows.values() if row.data.get("scenario") == "photos"]
    photos.sort(key=lambda row: order.get(row.data["dataset"], len(order)))
    heading = ["", "old classes before", "base", "novel", "all", "avg", "balanced", "seconds"]
    for (dataset, arch), found in groupby(photos, key=lambda row: (row.data["dataset"], row.data["arch"])):
        body = []
        for row in sorted(found, key=lambda row: (row.data["method"] not in OF_PHOTOS, -(row.value("balanced") or 0))):
            cells = [write.value(row, name) for name in ("base", "novel", "all", "avg", "balanced")]
            seconds = ", ".join(f"{each:.0f}" for each in row.data["seconds"])
            marked = write.link(row.label, row) + row.marks
            body.append([marked, number(row.data["before"]), *cells, seconds])
        about = row.data
        facts = f"{about['base_classes']:,} + {about['novel_classes']} classes, {about['test_images']:,} test images."
        folders = "--new new/ --memory old/ --test test/"
        command = f"`branchout bench photos {folders} --base {arch} --name {dataset}`"
        parts += [f"## {PHOTOS.get(dataset, dataset)}, `{arch}`", f"{facts} {command}", table(heading, body)]
        parts += commands_part(results, dataset, arch, write)
    return footnotes("\n\n".join([*parts, write.text("photos-selection")]))


def figures_page(rows: Rows, drawn: Mapping[str, Sequence[str]]) -> str:
    parts = ["# Figures", Writer("../../results").text("figures")]
    for dataset, names in drawn.items():
        parts.append(f"## {DATASETS.get(dataset, dataset)}")
        for name in names:
            title = f"{FIGURES[name]}: {table_named(name).title}"
            parts += [f"### {title}", f"![{title}](../figures/{dataset}/{name}.svg)"]
    return "\n\n".join(parts) + "\n"


def recipe_page(rows: Rows) -> str:
    """How the default recipe was found, and what each part of it changes."""
    write = Writer("../../results")
    names = {
        "score-fusion-paper": "the paper's text: stage I on new images, deltas, grid of 36 points",
        "score-fusion-reference": "the authors' experiments: other router and scale, the same grid",
        "stage-one-dial": "the paper's stage I, no deltas, the dial",
        "score-fusion-branchout": "**exemplars and distillation in stage I, the dial (default)**",
    }
    parts = ["# How the default recipe was selected", write.text("recipe")]
    for place in [
        *(f"tiny-imagenet-200/disjoint-40{split}" for split in ("", "-split2", "-split3")),
        "glyphs/disjoint-40",
    ]:
        body = []
        for name, told in names.items():
            found = [rows.get(Path(place, "resnet10", f"{name}-{goal}.json")) for goal in GOALS]
            if any(found):
                body.append([told, *(write.linked(row, goal) for row, goal in zip(found, GOALS, strict=True))])
        dataset, experiment = place.split("/")
        split = f", split {(experiment.partition('-split')[2] or 1)}" if dataset != "glyphs" else ""
        if body:
            heading = ["", *(f"best {goal}" for goal in GOALS)]
            parts += [f"## {DATASETS[dataset]}, ResNet10{split}", table(heading, body)]
    return footnotes("\n\n".join([*parts, *stage_one_part(rows, write)]))


def stage_one_part(rows: Rows, write: Writer) -> list[str]:
    """What exemplars and distillation gain in stage I, alone and together."""
    names = {
        "neither": "new images only",
        "no-exemplars": "distillation",
        "undistilled": "exemplars",
        "ours": "**exemplars and distillation (default)**",
    }
    parts = ["## What exemplars and distillation gain in stage I", write.text("recipe-stage-one")]
    for split in (1, 2, 3):
        folder = Path("steps", "tiny-imagenet-200-resnet10-one-step" + (f"-split{split}" if split > 1 else ""))
        found = {told: rows.get(folder / f"{name}.json") for name, told in names.items()}
        body = [[told, *(_two_fold(row, goal, write) for goal in GOALS)] for told, row in found.items() if row]
        if len(body) == len(names):
            parts += [f"### Split {split}", table(["stage I with", *GOALS], body)]
    return parts


def _two_fold(row: Row, goal: str, write: Writer) -> str:
    return f"[{number(row.data['two_fold'][goal])}]({write.results}/{row.path.as_posix()}#two_fold.{goal}){row.marks}"


def definitions_page(rows: Rows) -> str:
    write = Writer("../../results")
    found: dict[str, int] = {}
    for row in rows.values():
        if row.old:
            found[row.old] = found.get(row.old, 0) + 1
    ordered = sorted(found.items(), key=lambda each: -each[1])
    listed = [f"- {count} row{'s' if count > 1 else ''}: {plain(reason)}." for reason, count in ordered]
    reasons = "\n".join(["What has changed since it was measured:", "", *listed]) if listed else "No row is marked."
    text = write.text("definitions").replace("SUPERSEDED", reasons)
    text = text.replace("ONE_SEED", one_seed_list(rows)).replace("OTHER_BASE", other_bases(rows))
    text = text.replace("PAPER_ABOVE", ", ".join(paper_above_reference(rows)) or "none")
    corrected = "\n".join(f"- {plain(where)}: {plain(told)}" for where, told in misprints())
    return "\n\n".join([text, "## Misprints of the paper, corrected here", corrected]) + "\n"


def other_bases(rows: Rows) -> str:
    """The marked methods of each folder."""
    found: dict[str, dict[str, None]] = {}
    for row in rows.values():
        if row.other_base:
            found.setdefault("/".join(row.path.parts[:3]), {})[plain(row.label)] = None
    return "; ".join(f"{', '.join(names)} (`{folder}`)" for folder, names in found.items())


def paper_above_reference(rows: Rows) -> list[str]:
    """Where `paper` is above `reference` in balanced accuracy on Tiny-ImageNet, and by how much."""
    found = []
    for each in [*scenarios(rows), *scenarios_not_shown(rows)["tiny-imagenet-200"]]:
        pair = rows.get(each.ours.path.with_name("score-fusion-paper-balanced.json")), each.reference
        paper, reference = (row.value("balanced") if row else None for row in pair)
        margin = 0.0 if paper is None or reference is None else paper - reference
        if margin > 0:
            found.append(f"[{each.name}]({each.page}.md) by {number(margin)}")
    return found


def one_seed_list(rows: Rows) -> str:
    """The lines of the tables that rest on one seed. The pre-trained model, which has none, is not among them."""
    listed = []
    for section in (each for dataset in DATASETS for each in sections(dataset, rows)):
        names: dict[str, None] = {}
        for row in (line.row for line in section.lines if line.row and len(line.row.by_seed("all")) == 1):
            if row.data["method"] != "pretrained":
                shared = " (one stage I for all exemplar seeds)" if row.data.get("stage1_per_seed") is False else ""
                names[plain(row.label) + shared] = None
        if names:
            listed.append(f"- {section.heading}, Table {section.number}: {'; '.join(names)}.")
    behind = [row for path, row in rows.items() if len(path.parts) == 4 and path.parts[1].startswith(f"{BY_BASE}-")]
    listed.append(f"- Figure 2: {_of_one_seed(behind)}.")
    listed.append("- Figure 5: its curves.")
    alone = [row for path, row in rows.items() if path.name.startswith("stage-one-dial-")]
    listed.append(f"- [The recipe](recipe.md): the paper's stage I without deltas, {_of_one_seed(alone)}.")
    return "\n".join(listed)


def _of_one_seed(rows: Sequence[Row]) -> str:
    return f"{sum(len(row.data['seeds']) == 1 for row in rows)} of {len(rows)} rows"


def speed_page(results: Path) -> str:
    write = Writer("../../results")
    body = []
    for path in sorted((results / "speed").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        ratio = number(data["ratio"]) if data["ratio"] >= 1 else f"{data['ratio']:.3f}"
        link = f"[{ratio}]({write.results}/speed/{quote(path.name)})"
        body.append([link, plain(data["of"]), plain(data["against"]), plain(data["hardware"]), f"`{data['commit']}`"])
    heading = ["ratio", "of", "to", "on", "commit"]
    return "\n\n".join(["# Speed", write.text("speed"), table(heading, body, 5)]) + "\n"


def pages(rows: Rows, results: Path, drawn: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Every page by its path below docs/."""
    return {
        "results.md": screen(rows),
        "results/margins.md": margins_page(rows),
        "results/claims.md": claims_page(rows),
        "results/cases.md": cases_page(rows),
        "results/photos.md": photos_page(rows, results),
        **{f"results/{name}.md": text for name, text in table_pages(rows).items()},
        "results/figures.md": figures_page(rows, drawn),
        "results/recipe.md": recipe_page(rows),
        "results/definitions.md": definitions_page(rows),
        "results/speed.md": speed_page(results),
    }
