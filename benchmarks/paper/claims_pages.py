"""The pages of the paper's claims: a line for each, and every comparison behind them."""

from __future__ import annotations

from benchmarks.paper.claims import FIGURES, NUMBER, Claim, Comparison, Numbers, judged, reasons
from benchmarks.paper.markdown import Writer, anchor, footnotes, plain, signed, table
from benchmarks.paper.rows import NAMES, Row, Rows
from benchmarks.paper.tables import DATASETS, page_of
from branchout.bench.rows import number
from branchout.bench.tables import table_named


def claims_page(rows: Rows) -> str:
    write = Writer("../../results")
    parts = ["# The paper's claims", write.text("claims")]
    for dataset, name in DATASETS.items():
        claims = judged(dataset, rows)
        body = [[plain(claim.text), f"**{claim.verdict}**", *_worst(write, claim)] for claim in claims]
        heading = ["claim", "verdict", "worst case", "margin to the claim", "95% interval", "more"]
        parts += [f"## {name}", table(heading, body, 3)]
        told = [f"- **{claim.text}.** {_resolved(write, text)}" for claim, text in reasons(dataset, rows, claims)]
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
    name = each.sides[place] or ("" if short or len(numbers) > 1 else plain(numbers[0][0].label))
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
    heading = ["where", "metric", "first", "second", "margin to the claim", "95% interval", "verdict"]
    for key, body in bodies.items():
        parts += [f"## {texts[key]}", table(heading, body, 4)]
    return footnotes("\n\n".join(parts))
