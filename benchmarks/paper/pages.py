"""The pages of results as Markdown. Every number leads to its file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from benchmarks.paper.bootstrap import Difference, difference
from benchmarks.paper.claims import FIGURES, NUMBER, VERDICTS, Claim, Comparison, Numbers, judged, reasons
from benchmarks.paper.paper_numbers import misprints
from benchmarks.paper.rows import GOALS, NAMES, Row, Rows
from benchmarks.paper.tables import DATASETS, MEASURED, OF_PHOTOS, Line, Scenario, Section, page_of, scenarios, sections
from branchout.bench.rows import number
from branchout.bench.tables import table_named

TEXTS = Path(__file__).parent / "texts"
MARKS = {
    "†": "To be measured again: [why](definitions.md#marks).",
    "‡": "Measured with [another training of the base](definitions.md#marks).",
}


def signed(value: float) -> str:
    text = number(round(value, 6))
    return text.replace("-", "−") if text.strip("-0.") else "0.0"


def plain(words: str) -> str:
    """Text without meaning in Markdown."""
    return re.sub(r"([\\|<>\[\]*`])", r"\\\1", words)


def anchor(heading: str) -> str:
    """How a link names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Writer:
    """Cells with links, as seen from one page."""

    results: str
    """The way from the page to the results folder."""

    def link(self, words: str, row: Row) -> str:
        return f"[{words}]({self.results}/{quote(row.path.as_posix())})"

    def value(self, row: Row, metric: str) -> str:
        found = row.value(metric)
        spread = row.spread(metric) if metric != "parameters" else None
        return number(found) + (f" ± {number(round(spread, 6))}" if found is not None and spread is not None else "")

    def linked(self, row: Row | None, metric: str) -> str:
        """A number that leads to its own file, with the marks of its row."""
        if row is None or row.value(metric) is None:
            return "–"
        return self.link(self.value(row, metric), row) + row.marks

    def text(self, name: str) -> str:
        """A hand-written part; `results:` stands for the way to the results."""
        return (TEXTS / f"{name}.md").read_text(encoding="utf-8").strip().replace("](results:", f"]({self.results}/")


LEFT = ("more", "verdict", "best other method")


def table(heading: Sequence[str], body: Iterable[Sequence[str]], numbers: int = 1) -> str:
    """A Markdown table; columns from `numbers` on are aligned to the right."""
    rule = ["---" if place < numbers or name in LEFT else "---:" for place, name in enumerate(heading)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *body))


def footnotes(page: str) -> str:
    """The page with what its marks mean."""
    used = [f"{mark} {told}" for mark, told in MARKS.items() if f" {mark}" in page]
    return page.rstrip() + ("\n\n" + " ".join(used) if used else "") + "\n"


# The first screen.


def label_of(row: Row) -> str:
    told: str = row.data.get("label") or row.data["method"].replace("-", " ")
    return told


def screen(rows: Rows) -> str:
    write = Writer("../results")
    shown = scenarios(rows)
    if len(shown) < 2 or shown[0].page != "photos":
        return "# Results\n\nThe scenarios of the first screen are not measured. [All rows](results/rows.html).\n"
    heading = ["scenario", "**Branchout**", "the paper's recipe", "best other method", "joint training"]
    body = [
        [
            f"[{each.name}](results/{each.page}.md)",
            *(write.linked(row, "balanced") for row in (each.ours, each.reference)),
            write.linked(each.rival, "balanced") + (f" {plain(label_of(each.rival))}" if each.rival else ""),
            write.linked(each.joint, "balanced"),
        ]
        for each in shown
    ]
    parts = [
        "# Results",
        "\n".join(f"{place}. {told}" for place, told in enumerate(sentences(rows, shown), 1)),
        "![Balanced accuracy of Branchout, the paper's recipe, the best other method and joint training in each "
        "scenario, with 95% intervals](figures/overview.svg)",
        table(heading, body),
        "Balanced accuracy in %: the mean of `all`, where every image counts the same, and `avg`, where old and new "
        "classes do as a whole; ± standard deviation over seeds. Each number leads to its file. Branchout's recipe was "
        "[tuned](results/recipe.md) on the first line of Tiny-ImageNet, the other methods share one schedule. "
        "Sentences 2 to 4 count [margins](results/margins.md) of unmarked numbers. More scenarios: "
        "[another domain](results/table-11.md), [old classes only, ResNet18](results/table-6.md), "
        "[other classes, exemplars, a vision transformer](results/table-3.md). "
        "[Definitions and caveats](results/definitions.md) · [the paper's claims](results/claims.md) · "
        "[all rows, sortable](results/rows.html) ([CSV](results/rows.csv))",
    ]
    return footnotes("\n\n".join(parts)).replace("](definitions.md", "](results/definitions.md")


def sentences(rows: Rows, shown: Sequence[Scenario]) -> list[str]:
    """What the screen says, computed from the rows."""
    first = shown[0].ours
    recipe, other, joint = (_lead(found) for found in zip(*map(_against, shown), strict=True))
    claims = judged("tiny-imagenet-200", rows)
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    told = [
        f"A network with 1,000 ImageNet classes learns 102 flowers from 15 photos each: new classes reach "
        f"{number(first.value('novel'))}%, old ones go from {number(first.data['before'])}% to "
        f"{number(first.value('base'))}%. Some settings were [chosen with these test images in "
        f"view](results/photos.md).",
        f"In the scenarios of Tiny-ImageNet below, Branchout is above the paper's recipe in {recipe}.",
        f"Counting the flowers too, it is above the best other method, with the same dial where that applies, in "
        f"{other}.",
        f"Joint training, which sees all old images again, is above Branchout in {joint}.",
        f"Of the paper's {len(claims)} claims, {counts['holds']} hold on Tiny-ImageNet, {counts['does not hold']} do "
        f"not, and {counts['too close to tell']} are too close to tell.",
    ]
    if unmeasured := counts["not measured"]:
        told[-1] = f"{told[-1][:-1]}; {unmeasured} {'is' if unmeasured == 1 else 'are'} not measured."
    return told


def _against(each: Scenario) -> list[Difference | None]:
    """The lead over the paper's recipe and over the best other method, and that of joint training over Branchout.

    None where a side is not measured, or marked.
    """
    rival = each.rival if each.rival_is_current else None
    pairs = ((each.ours, each.reference), (each.ours, rival), (each.joint, each.ours))
    return [difference(a, b, "balanced") if a and b and not a.marks and not b.marks else None for a, b in pairs]


def _lead(differences: Sequence[Difference | None]) -> str:
    found = [each for each in differences if each is not None]
    if not found:
        return "0 of 0 scenarios"
    margins = [each.margin for each in found]
    return (
        f"{sum(margin > 0 for margin in margins)} of {len(found)} scenarios, by {signed(min(margins))} to "
        f"{signed(max(margins))} points; in {sum(each.low > 0 for each in found)} the 95% interval excludes zero"
    )


def margins_page(rows: Rows) -> str:
    """What the sentences of the first screen count, scenario by scenario."""
    body = [
        [
            f"[{each.name}]({each.page}.md)",
            *(
                "–" if found is None else f"{signed(found.margin)} ({signed(found.low)} to {signed(found.high)})"
                for found in _against(each)
            ),
        ]
        for each in scenarios(rows)
    ]
    heading = [
        "scenario",
        "Branchout − the paper's recipe",
        "Branchout − best other method",
        "joint training − Branchout",
    ]
    return "\n\n".join(["# Margins of the first screen", Writer("").text("margins"), table(heading, body)]) + "\n"


# The claims.


def claims_page(rows: Rows) -> str:
    write = Writer("../../results")
    parts = ["# The paper's claims", write.text("claims")]
    for dataset, name in DATASETS.items():
        claims = judged(dataset, rows)
        body = [[plain(claim.text), f"**{claim.verdict}**", *_worst(write, claim)] for claim in claims]
        heading = ["claim", "verdict", "worst case", "margin", "95% interval", "more"]
        parts += [f"## {name}", table(heading, body, 3)]
        told = [f"- {claim.text}: {_resolved(write, text)}" for claim, text in reasons(dataset, rows, claims)]
        if told:
            parts += ["Likely reasons where a claim does not hold:", "\n".join(told)]
    return footnotes("\n\n".join(parts))


def _resolved(write: Writer, text: str) -> str:
    return NUMBER.sub(lambda found: f"[{found[1]}]({write.results}/{found[2]}#{found[3]})", text)


def _worst(write: Writer, claim: Claim) -> list[str]:
    if claim.worst is None:
        return ["–", "–", "–", "–"]
    case, worst = claim.worst
    page = "figures" if case.table in FIGURES else page_of(table_named(case.table), case.arch)
    told = f"{case.where}: {_metric(worst)} {_side(write, worst, 0, short=True)} against {_side(write, worst, 1)}"
    return [told, *_margin(worst), f"[page]({page}.md), [cases](cases.md#{anchor(claim.text)})"]


def _metric(each: Comparison) -> str:
    return NAMES.get(each.metric, each.metric)


def _side(write: Writer, each: Comparison, place: int, *, short: bool = False) -> str:
    """One side of a comparison: a number with its file, or two of them, and what it is."""
    numbers: Numbers = (each.ours, each.theirs)[place]
    told = " − ".join(_number(write, row, value, each, place) for row, value in numbers)
    name = each.sides[place] or ("" if short or len(numbers) > 1 else plain(label_of(numbers[0][0])))
    return f"{told} ({name})" if name else told


def _number(write: Writer, row: Row, value: float, each: Comparison, place: int) -> str:
    if each.sides[place]:  # a mean over a curve, which a row does not hold as such
        return write.link(number(round(value, 6)), row) + row.marks
    return write.linked(row, each.metric)


def _margin(each: Comparison) -> list[str]:
    return [signed(each.found.margin), f"{signed(each.found.low)} to {signed(each.found.high)}"]


def cases_page(rows: Rows) -> str:
    write = Writer("../../results")
    parts = ["# Every comparison behind the claims", write.text("cases")]
    texts: dict[str, str] = {}
    bodies: dict[str, list[list[str]]] = {}
    for dataset, name in DATASETS.items():
        for claim in judged(dataset, rows):
            texts[claim.key] = claim.text
            for case in claim.cases:
                start = [f"{name}, {case.where}"]
                for each in case.comparisons:
                    sides = [_side(write, each, place) for place in (0, 1)]
                    cells = [_metric(each), *sides, *_margin(each), each.found.verdict]
                    bodies.setdefault(claim.key, []).append([*start, *cells])
                if case.missing:
                    missing = ["–", "–", "–", "–", "–", f"not measured ({case.missing})"]
                    bodies.setdefault(claim.key, []).append([*start, *missing])
    heading = ["where", "metric", "first", "second", "margin", "95% interval", "verdict"]
    for key, body in bodies.items():
        parts += [f"## {texts[key]}", table(heading, body, 4)]
    return footnotes("\n\n".join(parts))


# One page for each table, and for a strong base.


def table_pages(rows: Rows) -> dict[str, str]:
    found: dict[str, list[Section]] = {}
    for dataset in DATASETS:
        for section in sections(dataset, rows):
            found.setdefault(re.sub("[ab]", "", section.number), []).append(section)
    return {f"table-{key}": table_page(key, found[key]) for key in sorted(found, key=int)}


def table_page(key: str, shown: Sequence[Section]) -> str:
    write = Writer("../../results")
    titles = {each.number: each.table.title for each in shown if each.table.title}
    title = next(iter(titles.values())).split(", samples split")[0]
    parts = [f"# Table {key}: {title}"]
    for section in shown:
        halves = re.search(r"samples split .*", section.table.title)
        heading = section.heading + (f", {halves[0]}" if halves else "")
        facts = f"{section.facts()}; base model {number(section.about.data.get('base_model'))}."
        missing = f" Not measured: {plain('; '.join(section.missing))}." if section.missing else ""
        parts += [f"## {heading}", f"{facts} `{section.command}`{missing}", lines_table(write, section.lines)]
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


def photos_page(rows: Rows, results: Path) -> str:
    write = Writer("../../results")
    parts = ["# A strong base and someone's photos", write.text("photos")]
    photos = [row for row in rows.values() if row.data.get("scenario") == "photos"]
    heading = ["", "old classes before", "base", "novel", "all", "avg", "balanced", "seconds"]
    for (dataset, arch), found in groupby(photos, key=lambda row: (row.data["dataset"], row.data["arch"])):
        body = []
        for row in sorted(found, key=lambda row: (row.data["method"] not in OF_PHOTOS, -(row.value("balanced") or 0))):
            cells = [write.value(row, name) for name in ("base", "novel", "all", "avg", "balanced")]
            seconds = ", ".join(f"{each:.0f}" for each in row.data["seconds"])
            label = row.path.stem.replace("-", " ")
            marked = write.link(label, row) + row.marks
            body.append([marked, number(row.data["before"]), *cells, seconds])
        about = row.data
        facts = f"{about['base_classes']:,} + {about['novel_classes']} classes, {about['test_images']:,} test images."
        folders = "--new new/ --memory old/ --test test/"
        command = f"`branchout bench photos {folders} --base {arch} --name {dataset}`"
        parts += [f"## {dataset}, `{arch}`", f"{facts} {command}", table(heading, body)]
        parts += commands_part(results, dataset, arch, write)
    return footnotes("\n\n".join([*parts, write.text("photos-selection")]))


# The rest.


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
    text = write.text("definitions").replace("SUPERSEDED", "\n".join(listed) or "- No row is marked.")
    corrected = "\n".join(f"- {plain(where)}: {plain(told)}" for where, told in misprints())
    return "\n\n".join([text, "## Misprints of the paper, corrected here", corrected]) + "\n"


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
