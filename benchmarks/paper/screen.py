"""The first page of results: one screen. And the margins that its sentences count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.bootstrap import Difference, difference
from benchmarks.paper.claims import VERDICTS, judged
from benchmarks.paper.markdown import Writer, footnotes, plain, signed, table
from benchmarks.paper.rows import Row, Rows
from benchmarks.paper.tables import Scenario, scenarios, scenarios_not_shown
from branchout.bench.rows import number

OTHER_PHOTOS = ("clip-art", "garments")
ALSO = dict.fromkeys(("table-3", "table-7"), " ([Table 1](results/table-1.md))")
"""Where more methods of a scenario are."""
NEAR = 0.05
"""Intervals that end nearer to zero than this, in points, are counted."""


def screen(rows: Rows) -> str:
    write = Writer("../results")
    shown = scenarios(rows)
    if len(shown) < 2 or shown[0].page != "photos":
        return "# Results\n\nThe scenarios of the first screen are not measured. [All rows](results/rows.html).\n"
    other = "best other method (of how many)"
    heading = ["scenario", "**Branchout**", "the paper's recipe", other, "joint training, dial"]
    body = [
        [
            f"[{each.name}](results/{each.page}.md){ALSO.get(each.page, '')}",
            *(write.linked(row, "balanced") for row in (each.ours, each.reference)),
            write.linked(each.rival, "balanced")
            + (f" {plain(each.rival.label)} ({each.others})" if each.rival else ""),
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
        _caption(shown),
    ]
    return footnotes("\n\n".join(parts)).replace("](definitions.md", "](results/definitions.md")


def _caption(shown: Sequence[Scenario]) -> str:
    """What the columns mean."""
    text = Writer("../results").text("screen")
    bases = [float(each.ours.data["base_model"]) for each in shown[1:]]
    found = {"WEAKEST": number(min(bases)), "STRONGEST": number(max(bases))}
    found["FLOWERS"] = number(shown[0].ours.data["before"])
    for name, told in found.items():
        text = text.replace(name, told)
    return text


def sentences(rows: Rows, shown: Sequence[Scenario]) -> list[str]:
    """What the screen says, computed from the rows."""
    first = shown[0].ours
    marked = [each for each in shown if each.rival and _against(each)[1] is None]
    without = " and ".join(f"*{each.name}* ({_marks(each)})" for each in marked)
    counted = [each for each in shown if each.rival and each not in marked]
    on_features = sum(not each.whole_network for each in counted)
    kept = round(first.data["memory_images"] / first.data["base_classes"])
    place = "On two CPU cores" if first.path.stem.endswith("-cpu") else "On a GPU"
    recipe, other, joint = (_lead(found) for found in zip(*map(_against, shown), strict=True))
    new = Writer("../results").link(number(first.value("novel")), first)
    claims = judged("tiny-imagenet-200", rows)
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    told = [
        f"{place} a network with 1,000 ImageNet classes learns 102 flowers from 15 photos each, with {kept} kept "
        f"images of each old class: new classes reach {new}%, old ones go from {number(first.data['before'])}% to "
        f"{number(first.value('base'))}%. Some settings were [chosen with these test images in "
        f"view](results/photos.md).{_other_photos(rows)}",
        f"On Tiny-ImageNet, Branchout is above the paper's recipe in {recipe} ([margins](results/margins.md)).",
        f"It is above the best other method, as that is or with the same [dial](operating-points.md), in {other}. "
        f"{_largest(counted)}In {on_features} of these scenarios no other method that trains the whole network is "
        "measured."
        f"{f' Not counted: {without}.' if without else ''}",
        f"With the same dial, joint training, which sees all images, is above Branchout in {joint}; even without the "
        f"dial it is above Branchout in {_joint_without_dial(rows, shown)}.",
        f"Of the paper's [{len(claims)} claims](results/claims.md), {counts['holds']} hold on Tiny-ImageNet, "
        f"{counts['does not hold']} do not, and {counts['too close to tell']} are too close to tell.",
    ]
    if unmeasured := counts["not measured"]:
        told[-1] = f"{told[-1][:-1]}; {unmeasured} {'is' if unmeasured == 1 else 'are'} not measured."
    return told


def _other_photos(rows: Rows) -> str:
    """The same of image sets with which no setting was chosen."""
    found = [row for name in OTHER_PHOTOS if (row := rows.get(Path(name, "default-cpu.json")))]
    if not found:
        return ""
    write = Writer("../results")
    names = " and ".join(row.data["dataset"].replace("-", " ") for row in found)
    new = " and ".join(f"{write.link(number(row.value('novel')), row)}%" for row in found)
    old = " and ".join(f"{number(row.value('base'))}%" for row in found)
    before = number(found[0].data["before"])  # they share the base and its test images
    return f" With {names}, on two CPU cores, none was: new classes reach {new}, old ones go from {before}% to {old}."


def _largest(counted: Sequence[Scenario]) -> str:
    """Where the largest margin over another method is, and among how many: a few are easily surpassed."""
    measured = [(found.margin, each) for each in counted if (found := _against(each)[1])]
    if len(measured) < 2:
        return ""
    (second, _), (_, largest) = sorted(measured, key=lambda pair: pair[0])[-2:]
    return (
        f"The largest margin is in *{largest.name}*, among {largest.others} other methods; the second "
        f"largest is {signed(second)}. "
    )


def _marks(each: Scenario) -> str:
    return ", ".join(sorted({*(each.ours.marks + each.rival_marks).split()}))


def _joint_without_dial(rows: Rows, shown: Sequence[Scenario]) -> str:
    """In how many scenarios joint training as it is, is above Branchout; none of marked rows."""
    found = [against for each in shown if (against := _joint_alone(rows, each)[1])]
    return f"{sum(each.margin > 0 for each in found)} of {len(found)}"


def _joint_alone(rows: Rows, each: Scenario) -> tuple[Row | None, Difference | None]:
    """Joint training as it is, and its lead over Branchout."""
    alone = rows.get(each.ours.path.with_name("joint-plain.json"))
    return alone, difference(alone, each.ours, "balanced") if alone and not alone.marks + each.ours.marks else None


def _against(each: Scenario) -> list[Difference | None]:
    """The lead over the paper's recipe and over the best other method, and that of joint training over Branchout.

    None where a side is not measured, or marked.
    """
    rival = None if each.rival_marks else each.rival
    pairs = ((each.ours, each.reference), (each.ours, rival), (each.joint, each.ours))
    return [difference(a, b, "balanced") if a and b and not a.marks and not b.marks else None for a, b in pairs]


def _lead(differences: Sequence[Difference | None]) -> str:
    found = [each for each in differences if each is not None]
    if not found:
        return "0 of 0 scenarios"
    margins = [each.margin for each in found]
    return (
        f"{sum(margin > 0 for margin in margins)} of {len(found)} scenarios, margins {signed(min(margins))} to "
        f"{signed(max(margins))} points; in {sum(each.low > 0 for each in found)} the 95% interval excludes zero"
    )


def _with_interval(found: Difference) -> str:
    """Bold where the whole interval is above zero, which rounded limits do not always show."""
    margin = signed(found.margin)
    shown = f"**{margin}**" if found.low > 0 else margin
    return f"{shown} ({signed(found.low)} to {signed(found.high)})"


def margins_page(rows: Rows) -> str:
    """The margins that the sentences of the summary count, scenario by scenario."""
    heading = [
        "scenario",
        "Branchout",
        "Branchout − the paper's recipe",
        "Branchout − best other method",
        "joint training − Branchout",
        "joint training without the dial − Branchout",
    ]

    write = Writer("../../results")

    def cells(of: Scenario) -> list[str]:
        """The name of each side leads to its file; Branchout's is that of the line."""
        alone, over_ours = _joint_alone(rows, of)
        sides = (
            (of.reference, "recipe"), (of.rival, plain(of.rival.label) if of.rival else ""), (of.joint, "joint"),
            (alone, "joint"),
        )  # fmt: skip
        return [
            "–" if found is None or other is None else f"{_with_interval(found)} {write.link(name, other)}"
            for found, (other, name) in zip([*_against(of), over_ours], sides, strict=True)
        ]

    def shown(found: Sequence[Scenario]) -> str:
        lines = [[f"[{of.name}]({of.page}.md)", write.linked(of.ours, "balanced"), *cells(of)] for of in found]
        return table(heading, lines)

    def counted(found: Sequence[Scenario]) -> str:
        recipe, other, _ = zip(*map(_against, found), strict=True)
        return (
            f"Branchout is above the paper's recipe in {_lead(recipe)}. It is above the best other method in "
            f"{_lead(other)}."
        )

    others = scenarios_not_shown(rows)
    every = [
        each
        for of in [scenarios(rows), *others.values()]
        for scenario in of
        for each in (*_against(scenario), _joint_alone(rows, scenario)[1])
    ]
    near = sum(each is not None and 0 < each.low < NEAR for each in every)
    text = ["# Margins of the summary", Writer("").text("margins").replace("NEAR_ZERO", str(near))]
    text.append(shown(scenarios(rows)))
    for name, title in (("tiny-imagenet-200", "More scenarios of Tiny-ImageNet"), ("glyphs", "Characters")):
        if others[name]:
            text += [f"## {title}", counted(others[name]), shown(others[name])]
    return "\n\n".join(text) + "\n"
