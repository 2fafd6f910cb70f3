"""What the paper claims, as statements that can be checked against measured rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchout.bench.tables import BY_BASE

Rows = Mapping[Path, Mapping[str, Any]]

COMPARED = ("finetune", "lwf", "icarl", "bic", "wa", "der")
"""The class-incremental methods of the paper's Table 1."""
COMPARED_LARGER = ("finetune", "lwf", "icarl", "bic", "wa")
"""Those that it has with ResNet18."""
OVERLAPS = (
    "overlap-style", "overlap-random-shuffled", "overlap-random-clustered",
    "overlap-domain-shuffled", "overlap-domain-clustered",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    claim: str
    verdict: str
    """`holds`, `does not hold`, or `not measured`."""
    numbers: str


class Missing(Exception):  # noqa: N818 – not an error: the claim is then not measured
    """A row that a claim needs is not there."""


@dataclass(frozen=True)
class Measurements:
    """Rows of one dataset, by who they are about."""

    dataset: str
    rows: Rows

    def row(self, table: str, contender: str, point: str, arch: str = "resnet10") -> Mapping[str, Any]:
        path = Path(self.dataset) / table / arch / f"{contender}-{point}.json"
        if path not in self.rows:
            raise Missing(path)
        return self.rows[path]

    def figure(self, metric: str, table: str, contender: str, point: str, arch: str = "resnet10") -> float:
        value = self.row(table, contender, point, arch)["metrics"][metric]
        if value is None:
            raise Missing(table)
        return float(value)

    def best_of(self, metric: str, table: str, names: Sequence[str], arch: str = "resnet10") -> tuple[float, str]:
        """The best plain figure of several methods, all of which must be there, and whose it is."""
        return max((self.figure(metric, table, name, "plain", arch), name) for name in names)


Verdict = tuple[bool, str]
OURS = "score-fusion-reference"


def _near_joint(of: Measurements) -> Verdict:
    ours, joint = of.figure("all", "disjoint-40", OURS, "all"), of.figure("all", "disjoint-40", "joint", "plain")
    return joint - ours <= 1, f"{ours:.1f} against {joint:.1f}"


def _above_joint(of: Measurements) -> Verdict:
    ours, joint = of.figure("avg", "disjoint-40", OURS, "avg"), of.figure("avg", "disjoint-40", "joint", "plain")
    dial = of.figure("avg", "disjoint-40", "joint", "dial-avg")
    return ours > joint, f"{ours:.1f} against {joint:.1f}; joint training with the same dial reaches {dial:.1f}"


def _above_everyone(
    of: Measurements, contender: str = OURS, arch: str = "resnet10", names: Sequence[str] = COMPARED
) -> Verdict:
    told, held = [], True
    for metric in ("all", "avg"):
        ours = of.figure(metric, "disjoint-40", contender, metric)
        best, name = of.best_of(metric, "disjoint-40", names, arch)
        held &= ours > best
        told.append(f"{metric} {ours:.1f} against {best:.1f} ({name})")
    return held, "; ".join(told)


def _smaller_wins(of: Measurements) -> Verdict:
    return _above_everyone(of, arch="resnet18", names=COMPARED_LARGER)


def _max_pooling(of: Measurements) -> Verdict:
    told, held = [], True
    for table in OVERLAPS:
        try:
            largest, mean = (of.figure("avg", table, f"score-fusion{p}-reference", "avg") for p in ("", "-average"))
        except Missing:
            continue
        held &= largest > mean
        told.append(f"{table} {largest:.1f} against {mean:.1f}")
    if not told:
        raise Missing("overlap")
    return held, "; ".join(told)


def _tuned_heads(of: Measurements) -> Verdict:
    told, held = [], True
    for metric in ("all", "avg"):
        tuned, anew = (of.figure(metric, "disjoint-40", f"logitcat-{how}", "plain") for how in ("ft", "rt"))
        held &= tuned > anew
        told.append(f"{metric} {tuned:.1f} against {anew:.1f}")
    return held, "; ".join(told)


def _fc_only(of: Measurements) -> Verdict:
    return _above_everyone(of, "score-fusion-fc-reference")


def _deeper_branch(of: Measurements) -> Verdict:
    deep, usual = (
        of.figure("novel", "branch-depth", f"score-fusion{w}-reference", "balanced") for w in ("-layer3", "")
    )
    return deep > usual, f"novel {deep:.1f} against {usual:.1f}"


def _grid_trades(of: Measurements) -> Verdict:
    """Novel accuracy averaged over the grid: at the lowest and highest α, at the highest and lowest β."""
    curve = of.row("disjoint-40", OURS, "all").get("curve")
    if not curve:
        raise Missing("curve")

    def mean(name: str, value: float) -> float:
        found = [point["novel"] for point in curve if abs(point[name] - value) < 1e-9]
        if not found:
            raise Missing(name)
        return float(sum(found) / len(found))

    alpha, beta = (mean("alpha", 0.0), mean("alpha", 1.0)), (mean("beta", 1.0), mean("beta", 0.0))
    told = f"α 0 → 1: novel {alpha[0]:.1f} → {alpha[1]:.1f}; β 1 → 0: {beta[0]:.1f} → {beta[1]:.1f}"
    return alpha[1] > alpha[0] and beta[1] > beta[0], told


def alone(rows: Rows, dataset: str) -> dict[int, dict[str, float]]:
    """Novel accuracy by the number of base classes and by what was fine-tuned."""
    found: dict[int, dict[str, float]] = {}
    for path, row in rows.items():
        if path.parts[0] == dataset and path.parts[1].startswith(BY_BASE) and path.stem.endswith("-alone"):
            where = path.stem.removeprefix("alone-").removesuffix("-alone")
            found.setdefault(row["base_classes"], {})[where] = row["novel_alone"]
    return dict(sorted(found.items()))


def _gap_shrinks(of: Measurements) -> Verdict:
    found = {n: each for n, each in alone(of.rows, of.dataset).items() if {"fc", "layer4"} <= set(each)}
    if len(found) < 2:
        raise Missing(BY_BASE)
    gaps = {count: each["layer4"] - each["fc"] for count, each in found.items()}
    told = "; ".join(f"{count} base classes: {gap:.1f}" for count, gap in gaps.items())
    return list(gaps.values())[-1] < next(iter(gaps.values())), told


def _depth_stops(of: Measurements) -> Verdict:
    found = {n: each for n, each in alone(of.rows, of.dataset).items() if {"layer4", "layer3"} <= set(each)}
    if not found:
        raise Missing(BY_BASE)
    most = max(found)
    deeper = {where: value for where, value in found[most].items() if where not in ("fc", "layer4")}
    best = max(deeper, key=lambda where: deeper[where])
    usual = found[most]["layer4"]
    told = f"{most} base classes: layer4 {usual:.1f}, the best of deeper ones {deeper[best]:.1f} ({best})"
    return usual >= deeper[best], told


CLAIMS: tuple[tuple[str, Callable[[Measurements], Verdict]], ...] = (
    ("Best-all is within one point of joint training.", _near_joint),
    ("Best-avg is above joint training.", _above_joint),
    (
        "Score fusion is above every compared method, in Acc_all and in Acc_avg.",
        _above_everyone,
    ),
    ("With ResNet10 it is above the others with ResNet18.", _smaller_wins),
    ("Max pooling is above average pooling when classes overlap (Acc_avg).", _max_pooling),
    ("Fine-tuned heads are above retrained ones.", _tuned_heads),
    ("Fc-only is above every compared method.", _fc_only),
    ("Cloning layer3 too is above layer4 alone on novel classes when the domain changes.", _deeper_branch),
    ("Raising α or lowering β raises novel accuracy.", _grid_trades),
    ("Fine-tuning beyond the last block stops helping when base classes are many.", _depth_stops),
    ("The gap between frozen and fine-tuned features shrinks with base classes.", _gap_shrinks),
)


def checks(dataset: str, rows: Rows) -> Iterator[Check]:
    """Every claim with its verdict and the numbers it rests on."""
    of = Measurements(dataset, rows)
    for claim, check in CLAIMS:
        try:
            held, numbers = check(of)
        except Missing:
            yield Check(claim, "not measured", "")
        else:
            yield Check(claim, "**holds**" if held else "**does not hold**", numbers)
