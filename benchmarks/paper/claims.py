"""The paper's claims as comparisons of measured rows, each where the paper makes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.paper.bootstrap import Difference, difference, interval
from benchmarks.paper.paper_numbers import network, paper_number, paper_rows
from benchmarks.paper.rows import Row, Rows, row_of
from branchout.bench.methods import methods
from branchout.bench.rows import number
from branchout.bench.tables import BY_BASE, base_class_counts, networks_of, table_named

REFERENCE, FC_ONLY = "score-fusion-reference", "score-fusion-fc-reference"
COMPARED = {
    "resnet10": ("finetune", "lwf", "icarl", "bic", "wa", "der"),
    "resnet18": ("finetune", "lwf", "icarl", "bic", "wa"),
}
"""The class-incremental methods of the paper's Table 1."""
DEEPER = ("layer3", "layer2", "layer1", "stem")
"""Where fine-tuning starts when more than the last block, `layer4`, is fine-tuned."""
FIGURES = {
    "fig-base-classes": "Figure 2, left",
    "fig-finetune-depth": "Figure 2, right",
    "fig-design-space": "Figure 5",
}
VERDICTS = ("holds", "does not hold", "too close to tell", "not measured")
Numbers = tuple[tuple[Row, float], ...]


class Missing(Exception):  # noqa: N818 – not an error: the case is then not measured
    """A row that a claim needs is not there."""


@dataclass(frozen=True)
class Comparison:
    """One number against another. Each side is a row's number, or a row's number less another's."""

    metric: str
    ours: Numbers
    theirs: Numbers
    found: Difference
    lead: float = 0.0
    sides: tuple[str, str] = ("", "")
    """What each side is, where the row's label does not say it."""


@dataclass(frozen=True)
class Case:
    """A claim at one place of the paper."""

    table: str
    arch: str
    comparisons: tuple[Comparison, ...] = ()
    missing: str = ""

    @property
    def verdict(self) -> str:
        return overall([each.found.verdict for each in self.comparisons] or ["not measured"])

    @property
    def where(self) -> str:
        return FIGURES.get(self.table) or f"Table {paper_number(self.table, self.arch)}, {network(self.arch)}"

    @property
    def worst(self) -> Comparison | None:
        ranked = sorted(self.comparisons, key=lambda each: (_RANK[each.found.verdict], each.found.margin))
        return ranked[0] if ranked else None


@dataclass(frozen=True)
class Claim:
    key: str
    text: str
    cases: tuple[Case, ...]

    @property
    def verdict(self) -> str:
        """One counterexample is enough; `holds` needs every place to be measured."""
        return overall([case.verdict for case in self.cases])

    @property
    def worst(self) -> tuple[Case, Comparison] | None:
        found = [(case, case.worst) for case in self.cases]
        known = [(case, worst) for case, worst in found if worst is not None]
        return min(known, key=lambda each: (_RANK[each[1].found.verdict], each[1].found.margin)) if known else None


_RANK = {"does not hold": 0, "too close to tell": 1, "not measured": 2, "holds": 3}


def overall(verdicts: Sequence[str]) -> str:
    return min(verdicts, key=_RANK.__getitem__)


@dataclass(frozen=True)
class Measured:
    """The rows of one dataset."""

    dataset: str
    rows: Rows

    def row(self, experiment: str, arch: str, name: str, metric: str = "all", *, any_base: bool = False) -> Row:
        row = row_of(self.rows, self.dataset, experiment, arch, name)
        if row is None or row.value(metric) is None:
            raise Missing(f"no {metric} of {name}")
        if row.other_base and not any_base:
            raise Missing(f"{row.label} was measured with another training of the base model only")
        if row.old:
            raise Missing(f"{row.label} is to be measured again")
        return row

    def compare(self, metric: str, ours: Row, theirs: Row, lead: float = 0.0) -> Comparison:
        numbers = [((row, row.value(metric) or 0.0),) for row in (ours, theirs)]
        return Comparison(metric, numbers[0], numbers[1], difference(ours, theirs, metric, lead), lead)

    def above_all(
        self, experiment: str, ours: tuple[str, str], theirs: tuple[str, Sequence[str]], metric: str, lead: float = 0.0
    ) -> Comparison:
        """Our method at the point chosen for the metric against the best of others, all of which must be measured: with
        the same training of the base, unless they have another network anyway."""
        point = "all" if metric == "incremental" else metric
        mine = self.row(experiment, ours[0], f"{ours[1]}-{point}", metric)
        any_base = theirs[0] != ours[0]
        others = [self.row(experiment, theirs[0], f"{name}-plain", metric, any_base=any_base) for name in theirs[1]]
        return self.compare(metric, mine, _best(others, metric), lead)

    def alone(self, wanted: Sequence[str]) -> dict[int, dict[str, Row]]:
        """Rows of branches that learned new classes alone, by base classes: the fewest, and the most."""
        counts = base_class_counts(self.dataset)
        if len(counts) < 2:
            raise Missing("rows with two numbers of base classes")
        return {
            count: {
                where: self.row(f"{BY_BASE}-{count}", "resnet10", f"alone-{where}-alone", "alone") for where in wanted
            }
            for count in (min(counts), max(counts))
        }


def _best(rows: Sequence[Row], metric: str) -> Row:
    return max(rows, key=lambda row: row.value(metric) or 0.0)


Check = Callable[[Measured, str, str], list[Comparison]]


def near_joint(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    joint = of.row(experiment, arch, "joint-plain")
    return [of.compare("all", of.row(experiment, arch, f"{REFERENCE}-all"), joint, lead=-1)]


def above_joint(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    return [of.compare("avg", of.row(experiment, arch, f"{REFERENCE}-avg"), of.row(experiment, arch, "joint-plain"))]


def ten_points(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    return [of.above_all(experiment, (arch, REFERENCE), (arch, COMPARED[arch]), "all", lead=10)]


def above_everyone(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    return [of.above_all(experiment, (arch, REFERENCE), (arch, COMPARED[arch]), metric) for metric in ("all", "avg")]


def smaller_wins(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    others = (arch, COMPARED[arch])
    return [of.above_all(experiment, ("resnet10", REFERENCE), others, metric) for metric in ("all", "avg")]


def fc_only(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    return [of.above_all(experiment, (arch, FC_ONLY), (arch, COMPARED[arch]), metric) for metric in ("all", "avg")]


def many_steps(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    return [of.above_all(experiment, (arch, REFERENCE), (arch, ("bic", "podnet")), "incremental")]


def tuned_heads(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    names = ("logitcat-ft", "logitcat-rt", "featcat-rt")
    tuned, *anew = (of.row(experiment, arch, f"{name}-plain") for name in names)
    return [of.compare(metric, tuned, _best(anew, metric)) for metric in ("all", "avg")]


def is_rival(name: str) -> bool:
    baseline = methods()[name].baseline if name in methods() else None
    return baseline is not None and not baseline.oracle


def above_table(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    """Against every method of the paper's table that sees no more images than score fusion does."""
    table = table_named(experiment)
    told = paper_rows(table.name, arch)
    others = [name for name in table.methods_for(arch) if is_rival(name) and methods()[name].label in told]
    return [of.above_all(experiment, (arch, REFERENCE), (arch, others), metric) for metric in ("all", "avg")]


def deeper_branch(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    deeper, usual = (of.row(experiment, arch, f"score-fusion{where}-reference-balanced") for where in ("-layer3", ""))
    return [of.compare("novel", deeper, usual)]


def max_pooling(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    largest, average = (of.row(experiment, arch, f"logitcat-{how}-plain", "overlap") for how in ("max", "average"))
    return [of.compare("overlap", largest, average)]


def grid_trades(of: Measured, experiment: str, arch: str) -> list[Comparison]:
    """Novel accuracy from one end of the grid to the other, averaged over the other setting; the first seed."""
    row = of.row(experiment, arch, f"{REFERENCE}-all")
    grid = {(round(at["alpha"], 3), round(at["beta"], 3)): at["novel"] for at in row.data.get("curve") or ()}
    if len(grid) != 36:
        raise Missing("no whole grid in the row of the recipe reference")
    found = []
    for sign, place, begin, end in (("α", 0, 0.0, 1.0), ("β", 1, 1.0, 0.0)):
        ends = [[value for setting, value in grid.items() if setting[place] == at] for at in (end, begin)]
        means = [sum(values) / len(values) for values in ends]
        change = interval(means[0] - means[1], [(0.0, 1.0)], row.image_variance("novel"))
        sides = (f"{sign} = {end:g}", f"{sign} = {begin:g}")
        found.append(Comparison("novel", ((row, means[0]),), ((row, means[1]),), change, sides=sides))
    return found


def _gains(of: Measured, few: tuple[Row, Row], many: tuple[Row, Row]) -> list[Comparison]:
    """A gain with few base classes must be there, and must be larger than with many."""
    first = of.compare("alone", *few)
    gains: list[Numbers] = [tuple((row, row.value("alone") or 0.0) for row in pair) for pair in (few, many)]
    margin = (gains[0][0][1] - gains[0][1][1]) - (gains[1][0][1] - gains[1][1][1])
    variance = sum(row.image_variance("alone") for row in (*few, *many)) / 2
    return [first, Comparison("alone", gains[0], gains[1], interval(margin, [(0.0, 1.0)], variance))]


def gap_shrinks(of: Measured, *_: str) -> list[Comparison]:
    few, many = of.alone(("stem", "fc")).values()
    return _gains(of, (few["stem"], few["fc"]), (many["stem"], many["fc"]))


def depth_stops(of: Measured, *_: str) -> list[Comparison]:
    few, many = of.alone(("layer4", *DEEPER)).values()
    best = [_best([each[where] for where in DEEPER], "alone") for each in (few, many)]
    return _gains(of, (best[0], few["layer4"]), (best[1], many["layer4"]))


BOTH = (("sota", "resnet10"), ("sota", "resnet18"))
OVERLAPS = (
    "overlap-style", "overlap-random-shuffled", "overlap-random-clustered",
    "overlap-domain-shuffled", "overlap-domain-clustered",
)  # fmt: skip
LATER = tuple((table, "resnet10") for table in ("overlap-style", "overlap-full", "disjoint-200", *OVERLAPS[1:]))
"""Tables 5, 6 and 9 to 11."""
CLAIMS: tuple[tuple[str, str, tuple[tuple[str, str], ...], Check], ...] = (
    ("near-joint", "Best-Acc_all is within one point of joint training", (*BOTH, *LATER), near_joint),
    ("above-joint", "Best-Acc_avg is above joint training", (*BOTH, ("disjoint-40", "resnet50"), *LATER), above_joint),
    ("ten-points", "Score fusion is ten points above the best compared method", BOTH, ten_points),
    ("above-everyone", "Score fusion is above every compared method", BOTH, above_everyone),
    ("smaller-wins", "Score fusion with ResNet10 is above the others with ResNet18", BOTH[1:], smaller_wins),
    ("fc-only", "Fc-only is above every compared method", BOTH, fc_only),
    ("many-steps", "Over many steps score fusion is above BiC and PODNet", (("multistep", "resnet18"),), many_steps),
    ("tuned-heads", "Fine-tuned heads are above retrained ones", (("disjoint-40", "resnet10"),), tuned_heads),
    (
        "above-table",
        "Score fusion is above every other method of its table",
        (
            *(("disjoint-40", arch) for arch in ("resnet10", "resnet18", "resnet50")),
            *(place for place in LATER if place[0] != "overlap-random-shuffled"),  # there the paper's own is not
        ),
        above_table,
    ),
    ("deeper-branch", "A deeper branch helps when the domain changes", (("branch-depth", "resnet10"),), deeper_branch),
    (
        "max-pooling",
        "Max pooling is above average pooling on overlapping classes",
        tuple((table, "resnet10") for table in OVERLAPS),
        max_pooling,
    ),
    ("grid-trades", "A higher α or a lower β raises novel accuracy", (("fig-design-space", "resnet10"),), grid_trades),
    (
        "gap-shrinks",
        "The gap between frozen and fine-tuned features shrinks with more base classes",
        (("fig-base-classes", "resnet10"),),
        gap_shrinks,
    ),
    (
        "depth-stops",
        "Fine-tuning beyond the last block helps less with more base classes",
        (("fig-finetune-depth", "resnet10"),),
        depth_stops,
    ),
)


def judged(dataset: str, rows: Rows) -> list[Claim]:
    """Every claim about networks that a dataset is run with."""
    of = Measured(dataset, rows)
    found = []
    for key, text, places, check in CLAIMS:
        cases = []
        for name, arch in places:
            table = table_named(name)
            if arch in networks_of(table, dataset):
                try:
                    cases.append(Case(name, arch, tuple(check(of, table.experiment, arch))))
                except Missing as missing:
                    cases.append(Case(name, arch, missing=str(missing)))
        if cases:
            found.append(Claim(key, text, tuple(cases)))
    return found


NUMBER = re.compile(r"\[([\d.]+)\]\(results:(\S+?)#(\S+?)\)")
"""In reasons: a number, its file and its key."""


@cache
def _reasons() -> dict[str, dict[str, str]]:
    text = Path(__file__).with_name("reasons.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, str]] = json.loads(text)
    return known


def reasons(dataset: str, rows: Rows, claims: Sequence[Claim]) -> Iterator[tuple[Claim, str]]:
    """Likely reasons why claims do not hold; one whose numbers are no longer those of the rows is left out."""
    for claim in claims:
        text = _reasons().get(dataset, {}).get(claim.key)
        if text and claim.verdict == "does not hold" and all(_true(rows, *each) for each in NUMBER.findall(text)):
            yield claim, text


def _true(rows: Rows, shown: str, path: str, key: str) -> bool:
    row = rows.get(Path(path))
    return row is not None and number({**row.data, **row.data["metrics"]}.get(key)) == shown
