"""What the paper claims, as statements that are checked against measured rows, each where the paper makes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.paper import verdicts
from benchmarks.paper.measurements import Measurements, Missing, Rows, Verdict
from branchout.bench.rows import number
from branchout.bench.tables import networks_of, table_named

OVERLAPS = (
    "overlap-style", "overlap-random-shuffled", "overlap-random-clustered",
    "overlap-domain-shuffled", "overlap-domain-clustered",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A claim at one place of the paper: a table or figure, and a network."""

    table: str
    arch: str
    held: bool | None
    """None: not measured."""
    numbers: str
    """What it rests on, or what is missing."""
    close: bool = False
    """Whether chance could have decided it."""

    @property
    def verdict(self) -> str:
        if self.close:
            return "too close to tell"
        return {True: "holds", False: "does not hold", None: "not measured"}[self.held]

    @property
    def in_summary(self) -> str:
        """The numbers among those of other cases, where those against the claim stand out."""
        return f"{self.verdict}, {self.numbers}" if self.verdict == "does not hold" else self.numbers


@dataclass(frozen=True)
class Check:
    """A claim with all its cases."""

    key: str
    claim: str
    cases: tuple[Case, ...]
    reason: str | None
    """Why it probably does not hold, where it does not and somebody knows."""

    @property
    def verdict(self) -> str:
        """One counterexample is enough; `holds` needs every case, so that nothing passes by not being measured."""
        found = {case.verdict for case in self.cases}
        for verdict in ("does not hold", "too close to tell"):
            if verdict in found:
                return verdict
        if "not measured" in found:
            return "holds so far" if "holds" in found else "not measured"
        return "holds"


@dataclass(frozen=True)
class Claim:
    key: str
    claim: str
    places: tuple[tuple[str, str], ...]
    """Tables or figures with their networks; the claim is checked at each."""
    check: Callable[[Measurements, str, str], Verdict]


def checks(dataset: str, rows: Rows) -> Iterator[Check]:
    """Every claim about networks that a dataset is run with, judged by its rows."""
    of = Measurements(dataset, rows)
    for claim in CLAIMS:
        places = [(table, arch) for table, arch in claim.places if arch in networks_of(table_named(table), dataset)]
        if not places:
            continue
        cases = []
        for table, arch in places:
            try:
                found = claim.check(of, table, arch)
            except Missing as missing:
                cases.append(Case(table, arch, None, str(missing)))
            else:
                cases.append(Case(table, arch, found.held, found.told, found.close))
        failed = any(case.verdict == "does not hold" for case in cases)
        yield Check(claim.key, claim.claim, tuple(cases), reason(claim.key, of) if failed else None)


def reason(key: str, of: Measurements) -> str | None:
    """The likely reason why a claim does not hold on a dataset, written by hand about rows that somebody measured.

    Where the rows are others, and their figures not those that it rests on, it is not theirs.
    """
    entry = _reasons().get(of.dataset, {}).get(key)
    if entry is None:
        return None
    for name, figures in entry["rests_on"].items():
        row = of.rows.get(Path(of.dataset, f"{name}.json")) or {}
        known = {**row, **row.get("metrics", {})}
        if any(number(known.get(figure)) != told for figure, told in figures.items()):
            return None
    found: str = entry["reason"]
    return found


@cache
def _reasons() -> dict[str, dict[str, dict[str, Any]]]:
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(
        Path(__file__).with_name("reasons.json").read_text(encoding="utf-8")
    )
    return known


BOTH_NETWORKS = (("sota", "resnet10"), ("sota", "resnet18"))
LATER = tuple((table, "resnet10") for table in ("overlap-style", "overlap-full", "disjoint-200", *OVERLAPS[1:]))
"""Tables 5, 6 and 9 to 11."""

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "near-joint",
        "Best-Acc_all is within one point of joint training (Acc_all).",
        (*BOTH_NETWORKS, *LATER),  # with ResNet50 the paper's own is not
        verdicts.near_joint,
    ),
    Claim(
        "above-joint",
        "Best-Acc_avg is above joint training (Acc_avg).",
        (*BOTH_NETWORKS, *LATER[:2], ("disjoint-40", "resnet50"), *LATER[2:]),
        verdicts.above_joint,
    ),
    Claim(
        "ten-points",
        "Score fusion is ten points above the best compared method (Acc_all).",
        BOTH_NETWORKS,
        verdicts.ten_points_above,
    ),
    Claim(
        "above-everyone",
        "Score fusion is above every compared method, in Acc_all and in Acc_avg.",
        BOTH_NETWORKS,
        verdicts.above_everyone,
    ),
    Claim(
        "smaller-wins",
        "Score fusion with ResNet10 is above the compared methods with ResNet18, in Acc_all and in Acc_avg.",
        (("sota", "resnet18"),),
        verdicts.smaller_wins,
    ),
    Claim(
        "fc-only",
        "Fc-only, with no more parameters than the others, is above every compared method, in Acc_all and in Acc_avg.",
        BOTH_NETWORKS,
        verdicts.fc_only,
    ),
    Claim(
        "many-steps",
        "Over many steps best-Acc_all is above BiC and PODNet (incremental accuracy).",
        (("multistep", "resnet18"),),
        verdicts.many_steps,
    ),
    Claim(
        "tuned-heads",
        "Fine-tuned heads are above retrained ones, in Acc_all and in Acc_avg.",
        (("disjoint-40", "resnet10"),),
        verdicts.tuned_heads,
    ),
    Claim(
        "above-table",
        "Score fusion is above every other method of its table, oracles apart, in Acc_all and in Acc_avg.",
        (
            ("disjoint-40", "resnet10"),
            ("disjoint-40", "resnet18"),
            ("disjoint-40", "resnet50"),
            *(
                place for place in LATER if place[0] != "overlap-random-shuffled"
            ),  # where the paper's own misses by 0.02
        ),
        verdicts.above_table,
    ),
    Claim(
        "deeper-branch",
        "Cloning layer3 too is above layer4 alone on novel classes when the domain changes (best-balanced).",
        (("branch-depth", "resnet10"),),
        verdicts.deeper_branch,
    ),
    Claim(
        "max-pooling",
        "Max pooling is above average pooling on overlapping classes (Acc_ovlp).",
        tuple((table, "resnet10") for table in OVERLAPS),
        verdicts.max_pooling,
    ),
    Claim(
        "grid-trades",
        "Raising α or lowering β raises novel accuracy.",
        (("fig-design-space", "resnet10"),),
        verdicts.grid_trades,
    ),
    Claim(
        "gap-shrinks",
        "The gap between frozen and fine-tuned features shrinks with the number of base classes.",
        (("fig-base-classes", "resnet10"),),
        verdicts.gap_shrinks,
    ),
    Claim(
        "depth-stops",
        "Fine-tuning beyond the last block stops helping when base classes are many.",
        (("fig-finetune-depth", "resnet10"),),
        verdicts.depth_stops,
    ),
)
