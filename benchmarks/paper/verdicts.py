"""How each claim of the paper is judged: one function for each, from measured rows to a verdict with its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.paper.measurements import Measurements, Missing, Verdict, alone, alone_rows, decided, label, tuned_from
from benchmarks.paper.paper_numbers import paper_rows
from branchout.bench.methods import methods
from branchout.bench.rows import number
from branchout.bench.tables import base_class_counts, table_named
from branchout.report.formatting import MINUS

OURS, DEFAULT, FC_ONLY = "score-fusion-reference", "score-fusion-branchout", "score-fusion-fc-reference"
COMPARED = ("finetune", "lwf", "icarl", "bic", "wa", "der")
"""The class-incremental methods of the paper's Table 1."""
COMPARED_LARGER = ("finetune", "lwf", "icarl", "bic", "wa")
"""Those that it has with ResNet18."""
DEEPER = ("layer3", "layer2", "layer1", "stem")
"""From where more is fine-tuned than the last block, `layer4`."""

# Joint training, and everybody who stands in the paper's tables.


def near_joint(of: Measurements, table: str, arch: str) -> Verdict:
    experiment = table_named(table).experiment
    ours, joint = (of.value("all", experiment, *who, arch) for who in ((OURS, "all"), ("joint", "plain")))
    default = of.perhaps("all", experiment, DEFAULT, "all", arch)
    told = f"all {ours} against {joint}" + (f"; Branchout's recipe {default}" if default else "")
    return decided([(1 - (joint.mean - ours.mean), ours.chance(joint))], told)


def above_joint(of: Measurements, table: str, arch: str) -> Verdict:
    experiment = table_named(table).experiment
    ours, joint = (of.value("avg", experiment, *who, arch) for who in ((OURS, "avg"), ("joint", "plain")))
    told = f"avg {ours.against(joint)}"
    for what, method, point in (
        ("Branchout's recipe", DEFAULT, "avg"),
        ("joint training with the same dial", "joint", "dial-avg"),
    ):
        value = of.perhaps("avg", experiment, method, point, arch)
        told += f"; {what} {value}" if value else ""
    return decided([(ours.mean - joint.mean, ours.chance(joint))], told)


def _above(
    of: Measurements,
    table: str,
    ours: tuple[str, str],
    others: tuple[str, Sequence[str]],
    metrics: Mapping[str, str],
    lead: float = 0.0,
) -> Verdict:
    """Whether our method is above all others in each metric, by `lead` points, at the point that is chosen for it.

    Both sides are methods and a network. All others must be measured. What everybody in the table reaches with the
    same dial is told.
    """
    experiment = table_named(table).experiment
    method, arch = ours
    network, names = others
    told, dialled, margins = [], [], []
    for metric, point in metrics.items():
        mine = of.value(metric, experiment, method, point, arch)
        theirs = {name: of.value(metric, experiment, name, "plain", network) for name in names}
        best = max(theirs, key=lambda name: theirs[name].mean)
        margins.append((mine.mean - theirs[best].mean - lead, mine.chance(theirs[best])))
        told.append(f"{metric} {mine.against(theirs[best], label(best))}")
        found = {
            name: of.perhaps(metric, experiment, name, f"dial-{point}", network)
            for name in table_named(table).of(network)
            if _is_rival(name)
        }
        moved = {name: value for name, value in found.items() if value}
        if moved:
            best = max(moved, key=lambda name: moved[name].mean)
            dialled.append(f"{metric} {moved[best]} ({label(best)})")
    if dialled:
        told.append(f"with the same dial the best others reach {', '.join(dialled)}")
    default = {metric: of.perhaps(metric, experiment, DEFAULT, point, arch) for metric, point in metrics.items()}
    known = [f"{metric} {value}" for metric, value in default.items() if value]
    if known:
        told.append(f"Branchout's recipe {', '.join(known)}")
    return decided(margins, "; ".join(told))


def _is_rival(name: str) -> bool:
    baseline = methods()[name].baseline
    return baseline is not None and not baseline.oracle


BOTH = {"all": "all", "avg": "avg"}


def above_everyone(of: Measurements, table: str, arch: str) -> Verdict:
    return _above(of, table, (OURS, arch), (arch, _compared(arch)), BOTH)


def ten_points_above(of: Measurements, table: str, arch: str) -> Verdict:
    return _above(of, table, (OURS, arch), (arch, _compared(arch)), {"all": "all"}, lead=10)


def smaller_wins(of: Measurements, table: str, arch: str) -> Verdict:
    return _above(of, table, (OURS, "resnet10"), (arch, COMPARED_LARGER), BOTH)


def fc_only(of: Measurements, table: str, arch: str) -> Verdict:
    return _above(of, table, (FC_ONLY, arch), (arch, _compared(arch)), BOTH)


def many_steps(of: Measurements, table: str, arch: str) -> Verdict:
    return _above(of, table, (OURS, arch), (arch, ("bic", "podnet")), {"incremental": "all"})


def _compared(arch: str) -> Sequence[str]:
    return COMPARED if arch == "resnet10" else COMPARED_LARGER


def above_table(of: Measurements, table: str, arch: str) -> Verdict:
    """Against everybody whom the paper has in that table and who sees no more than the method does."""
    told = paper_rows(table, arch)
    names = [name for name in table_named(table).of(arch) if _is_rival(name) and label(name) in told]
    return _above(of, table, (OURS, arch), (arch, names), BOTH)


# The parts of the method.


def tuned_heads(of: Measurements, table: str, arch: str) -> Verdict:
    """The paper's point is fine-tuning against both ways of training anew."""
    told, margins = [], []
    for metric in BOTH:
        tuned = of.value(metric, table, "logitcat-ft", "plain", arch)
        anew = {name: of.value(metric, table, name, "plain", arch) for name in ("logitcat-rt", "featcat-rt")}
        best = max(anew, key=lambda name: anew[name].mean)
        margins.append((tuned.mean - anew[best].mean, tuned.chance(anew[best])))
        told.append(f"{metric} {tuned.against(anew[best], label(best))}")
    return decided(margins, "; ".join(told))


def deeper_branch(of: Measurements, table: str, arch: str) -> Verdict:
    deep, usual = (
        of.value("novel", table, f"score-fusion{where}-reference", "balanced", arch) for where in ("-layer3", "")
    )
    return decided([(deep.mean - usual.mean, deep.chance(usual))], f"novel {deep.against(usual)}")


def max_pooling(of: Measurements, table: str, arch: str) -> Verdict:
    """As the paper compares them: logits side by side, nothing trained. Score fusion's own are told beside it."""
    largest, mean = (of.value("overlap", table, f"logitcat-{how}", "plain", arch) for how in ("max", "average"))
    base = [of.value("base", table, f"logitcat-{how}", "plain", arch) for how in ("max", "average")]
    told = f"overlap {largest.against(mean)}; base {base[0].against(base[1])}"
    fused = [of.perhaps("overlap", table, f"score-fusion{how}-reference", "avg", arch) for how in ("", "-average")]
    if fused[0] and fused[1]:
        told += f"; within score fusion (best-Acc_avg) overlap {fused[0].against(fused[1])}"
    return decided([(largest.mean - mean.mean, largest.chance(mean))], told)


# The figures.


def grid_trades(of: Measurements, _: str, arch: str) -> Verdict:
    """From one end of the grid to the other, at every value of the other setting; the mean decides."""
    row = of.row("disjoint-40", OURS, "all", arch)
    curve = row.get("curve") or ()
    grid = {(round(point["alpha"], 3), round(point["beta"], 3)): point for point in curve}

    def change(metric: str, begin: int, end: int, place: int) -> list[float]:
        """What moving α (place 0) or β (place 1) changes, for each value of the other."""
        found = []
        for other in sorted({setting[1 - place] for setting in grid}):
            first, last = ((at, other) if place == 0 else (other, at) for at in (float(begin), float(end)))
            if first in grid and last in grid:
                found.append(grid[last][metric] - grid[first][metric])
        if not found:
            raise Missing("no whole grid in the row of score-fusion-reference, all")
        return found

    told, margins = [], []
    for name, begin, end, place in (("α", 0, 1, 0), ("β", 1, 0, 1)):
        novel, base = (change(metric, begin, end, place) for metric in ("novel", "base"))
        gain = sum(novel) / len(novel)
        margins.append((gain, of.error(row, "novel")))
        rises = sum(each > 0 for each in novel)
        told.append(
            f"{name} from {begin} to {end}: novel {_signed(gain)}, base {_signed(sum(base) / len(base))} on average "
            f"(novel rises at {rises} of {len(novel)} values of {'βα'[place]})"
        )
    return decided(margins, "; ".join(told) + "; first seed")


def _signed(points: float) -> str:
    return f"{'+' if points >= 0 else MINUS}{number(_points(abs(points)))}"


def _points(difference: float) -> float:
    """As exact as the numbers in rows are: what subtracting adds in later digits would turn halves the wrong way."""
    return round(difference, 3)


def _fewest_and_most(of: Measurements, wanted: set[str]) -> dict[int, dict[str, float]]:
    odd = of.odd.intersection(alone_rows(of.rows, of.dataset))
    if odd:
        raise Missing(f"{sorted(odd)[0]} only with another training of the base model")
    found = alone(of.rows, of.dataset)
    counts = base_class_counts(of.dataset) or tuple(found)
    found = {count: each for count, each in found.items() if count in counts}  # not those of another scale
    if len(counts) < 2:
        raise Missing("rows with two numbers of base classes at least")
    for count in (min(counts), max(counts)):
        absent = sorted(wanted - set(found.get(count, ())))
        if absent:
            raise Missing(f"no row of {absent[0]} with {count} base classes")
    return found


def depth_stops(of: Measurements, *_: str) -> Verdict:
    """Few base classes: fine-tuning more helps. Many: it does not. The second without the first would say nothing."""
    found = _fewest_and_most(of, {"layer4", *DEEPER})
    told, margins = [], []
    for count in (min(found), max(found)):
        best = max(DEEPER, key=lambda where: found[count][where])
        chance = _chance_alone(of, count, best)
        gain = found[count][best] - found[count]["layer4"]
        # That more does not help is not lost by what chance could have added.
        margins.append((gain, chance) if count == min(found) else (2 * chance - gain, chance))
        told.append(
            f"{count} base classes: last block {number(found[count]['layer4'])}, "
            f"the best of those that fine-tune more {number(found[count][best])} (from {best})"
        )
    return decided(margins, "; ".join(told))


def gap_shrinks(of: Measurements, *_: str) -> Verdict:
    """The paper fine-tunes all features; the gap must be there with few base classes before it can shrink."""
    found = _fewest_and_most(of, {"fc", "stem"})
    gaps = {count: _points(each["stem"] - each["fc"]) for count, each in found.items() if {"fc", "stem"} <= set(each)}
    told = ", ".join(f"{number(gap)} points with {count}" for count, gap in gaps.items())
    block = [number(_points(each["layer4"] - each["fc"])) for each in found.values() if {"fc", "layer4"} <= set(each)]
    fewest, most = gaps[min(gaps)], gaps[max(gaps)]
    more = f"; with the last block alone fine-tuned {', '.join(block)}" if len(block) == len(found) else ""
    chance = _chance_alone(of, min(gaps), "fc")
    margins = [(fewest, chance), (fewest - most, chance)]
    return decided(margins, f"everything fine-tuned is above frozen by {told} base classes{more}")


def _chance_alone(of: Measurements, base_classes: int, where: str) -> float:
    rows = alone_rows(of.rows, of.dataset)
    (row,) = (rows[path] for path in rows if (rows[path]["base_classes"], tuned_from(path)) == (base_classes, where))
    return of.error_alone(row)
