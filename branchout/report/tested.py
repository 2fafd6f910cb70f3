"""The part of the report that labelled images fill: classes, confusions, pictures, overlapping classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from branchout.report.markup import change, count, named, note, percent, row, table, text

Facts = Mapping[str, Any]
Section = tuple[str, str, str]
MOST_CLASSES = 2000
"""Rows of the table of classes; of more only the worst are shown."""
MOST_PAIRS = 20
TITLES = {
    "forgotten": ("Forgotten", "Right before the last step, wrong now."),
    "won": ("Won", "Right now; wrong before, or of a class that was not known then."),
}


def sections(facts: Facts) -> list[Section]:
    if facts["test"] is None:
        return []
    if facts["test"]["before"] is None:  # a base model has nothing to compare with
        return [_classes(facts)]
    return [_classes(facts), _confusions(facts), *(_gallery(facts, kind) for kind in TITLES), _overlap(facts)]


# Class by class.


def _classes(facts: Facts) -> Section:
    every = facts["test"]["classes"]
    rows = [_class_row(facts, each) for each in every[:MOST_CLASSES]]
    grown = facts["test"]["before"] is not None
    measured = ("before", "after", "change") if grown else ("accuracy",)
    headings = [("class", "name"), ("part", "word"), ("images", "number wide")]
    headings += [*((name, "number") for name in measured), ("0 – 100", "bar")]
    hidden = len(every) - len(rows)
    more = f" The {hidden:,} that lost least are left out." if hidden else ""
    told = "○ before, ◆ after. Accuracy in %, worst losses first." if grown else "Accuracy in %, lowest first."
    listed = table(headings, rows, caption=told + more, name="classes", sortable=True, sorted_by=5 if grown else 3)
    body = (
        '<p class="controls" hidden><label>Find a class '
        '<input type="search" data-filter="classes" autocomplete="off"></label>'
        f'<button type="button" data-unfold="classes">Show all {len(rows):,}</button></p>{listed}'
        '<p class="print-only note">On paper only the first forty classes are shown; the page itself has more.</p>'
    )
    return "per-class", "Class by class", body


def _class_row(facts: Facts, each: Facts) -> str:
    number, before, after = each["class"], each["before"], each["after"]
    cells = [
        ("name", named(facts["classes"][number])),
        ("word", text(facts["parts"][facts["part_of_class"][number]])),
        ("number wide", f"{each['images']:,}"),
    ]
    if facts["test"]["before"] is None:
        cells.append(("number after", percent(after)))
    else:
        cells.append(("number", percent(before, "")))
        cells.append(("number after", percent(after)))
        cells.append(("number change", change(before, after)))
    cells.append(("bar", _bar(before, after)))
    earlier = "" if before is None else f' data-before="{before}"'
    return row(cells, f' data-class="{number}"{earlier}')


def _bar(before: float | None, after: float) -> str:
    """A ring and a diamond on one line; drawn without styles of its own, which a strict policy would forbid."""
    ring = "" if before is None else f'<circle cx="{100 * before:.1f}%" cy="50%" r="4"/>'
    return (
        '<svg class="bar" aria-hidden="true"><line x2="100%" y1="50%" y2="50%"/>'
        f'{ring}<rect x="{100 * after:.1f}%" y="50%" width="7" height="7"/></svg>'
    )


# Who takes images from whom.


def _confusions(facts: Facts) -> Section:
    several = max(facts["first_branch"]) > 1
    later = _pairs(
        facts, "to_later", "Earlier classes that lose to later ones" if several else "Old images taken by new classes"
    )
    earlier = _pairs(
        facts, "to_earlier", "Later classes that lose to earlier ones" if several else "New images taken by old classes"
    )
    return "confusions", "Confusions between old and new", f'{_parts(facts)}<div class="pair">{later}{earlier}</div>'


def _pairs(facts: Facts, key: str, title: str) -> str:
    """Which class loses how many images to which."""
    rows = facts["test"][key]
    # After the first step nothing that a new class lost can have been right before.
    were = key == "to_later" or len(facts["branches"]) > 2
    headings = [("class", "name"), ("answered with", "name"), ("images", "number")]
    headings += [("right before", "number")] if were else []
    listed = table(
        headings,
        [_pair(facts, *each, were=were) for each in rows[:MOST_PAIRS]],
        caption=f'<span data-shown="">{_shown(len(rows))}</span>',
        sortable=True,
    )
    total = sum(each[2] for each in rows)
    mark = ' data-was=""' if were else ""
    return f'<div data-pairs="{key}"{mark}><h3>{title}: <span data-total="">{total:,}</span></h3>{listed}</div>'


def _shown(pairs: int) -> str:
    return f"the {MOST_PAIRS} most frequent of {pairs:,} pairs" if pairs > MOST_PAIRS else count(pairs, "pair")


def _pair(facts: Facts, truth: int, answer: int, images: int, right: int, *, were: bool) -> str:
    cells = [("name", named(facts["classes"][number])) for number in (truth, answer)]
    cells.append(("number", f"{images:,}"))
    return row([*cells, ("number", f"{right:,}")] if were else cells)


def _parts(facts: Facts) -> str:
    """For each part how many images are right, and into which part's classes the wrong ones went."""
    test, parts = facts["test"], facts["parts"]
    present = [n for n in range(len(parts)) if n in facts["part_of_class"]]
    images, right = ([0] * len(parts) for _ in range(2))
    for each in test["classes"]:
        part = facts["part_of_class"][each["class"]]
        images[part] += each["images"]
        right[part] += round(each["after"] * each["images"])
    rows = []
    for n in present:
        if images[n]:
            share = f'<small>(<span data-share="{n}">{percent(right[n] / images[n])}</span>%)</small>'
            cells = [("name", text(parts[n])), ("number", f"{images[n]:,}")]
            cells.append(("number", f'<span data-right="{n}">{right[n]:,}</span> {share}'))
            for m in present:
                wrong = test["confusion"][n][m] - (right[n] if m == n else 0)
                cells.append(("number", f'<span data-cell="{n},{m}">{wrong:,}</span>'))
            rows.append(row(cells))
    headings = [("images of", "name"), ("images", "number"), ("right", "number")]
    headings += [(f"wrong, as {parts[m]}", "number") for m in present]
    return table(headings, rows, caption="Where answers go: right, or wrong with a class of which part", name="parts")


# Pictures.


def _gallery(facts: Facts, kind: str) -> Section:
    test = facts["test"]
    title, told = TITLES[kind]
    number, shown = test[kind]["count"], _drawn(facts, kind)
    here = saved_answers(facts)
    items = "".join(_picture(facts, image, here[image]) for image in shown)
    of = f"{len(shown):,} of {number:,} are shown" if len(shown) < number else f"all {number:,} are shown"
    counted = f"{count(number, 'image')}; {of if number else 'there are none'}."
    options = "".join(
        f'<option value="{n}">{text(name)}</option>'
        for n, name in enumerate(facts["parts"])
        if _can_hold(facts, kind, n)
    )
    body = (
        f'<p class="lead">{told} <span data-of="{kind}">{counted}</span></p><p class="controls" data-live="" hidden>'
        f'<label>Only <select data-only="{kind}"><option value="">all parts</option>{options}</select></label></p>'
        f'<ul class="gallery" data-gallery="{kind}">{items}</ul>'
    )
    return kind, title, body


def _can_hold(facts: Facts, kind: str, part: int) -> bool:
    """Whether a part has classes that may be in a gallery: what was not known before cannot be forgotten."""
    members = [number for number, of in enumerate(facts["part_of_class"]) if of == part]
    return any(kind == "won" or number < facts["test"]["known"] for number in members)


def saved_answers(facts: Facts) -> dict[int, int]:
    """What is answered at the saved point, for the images whose pictures are here."""
    answers, saved = facts["test"]["answers"], facts["frontier"]["saved"]
    found = {int(image): answers["first"][int(image)] for image in facts["test"]["pictures"]}
    for image, point, value in zip(answers["image"], answers["point"], answers["value"], strict=True):
        if image in found and point <= saved:
            found[image] = value
    return found


def _drawn(facts: Facts, kind: str) -> list[int]:
    """The images of a gallery at the saved point."""
    test, here = facts["test"], saved_answers(facts)
    shown = []
    for image in test[kind]["images"]:
        label = test["labels"][image]
        was_right = label < test["known"] and test["before"][image] == label
        if was_right == (kind == "forgotten") and (here[image] == label) == (kind == "won"):
            shown.append(image)
    return shown[: test["gallery"]]


def _picture(facts: Facts, image: int, now: int) -> str:
    test, names = facts["test"], facts["classes"]
    kept, label, before = test["pictures"][str(image)], test["labels"][image], test["before"][image]
    answers = "".join(_answer(when, names[said], said == label) for when, said in (("before", before), ("now", now)))
    return (
        f'<li data-image="{image}"><figure><img src="{kept["src"]}" alt="{text(names[label])}" '
        f'title="{text(kept["file"])}"><figcaption><strong>{named(names[label])}</strong>{answers}</figcaption>'
        "</figure></li>"
    )


def _answer(when: str, name: str, right: bool) -> str:
    """An answer that is right need not repeat the name above it."""
    if right:
        return f'<span class="right">✓ right {when}</span>'
    return f'<span class="wrong">✗ {when}: {named(name)}</span>'


# Overlapping classes.


def _overlap(facts: Facts) -> Section:
    test, branches = facts["test"], facts["branches"]
    rows = []
    for each in test["overlap"]:
        cells = [
            ("name", named(facts["classes"][each["class"]])),
            ("number", f"{each['images']:,}"),
            ("number", percent(each["before"])),
            ("number after", percent(each["after"])),
            *((f"number by-{d}", f"{right:,}") for d, right in enumerate(each["by"])),
        ]
        rows.append(row(cells, f' data-class="{each["class"]}"'))
    if not rows:
        return "overlap", "Overlapping classes", ""
    headings = [("class", "name"), ("images", "number"), ("before", "number"), ("after", "number")]
    headings += [(f"by {branch['name']}", "number") for branch in branches]
    told = "Several branches know these classes, and " + (
        "the one whose score is highest speaks."
        if facts["about"]["pooler"] == "max"
        else "their scores are averaged; counted is whose score was the highest."
    )
    caption = "Accuracy in %, and how many right answers each branch gave"
    listed = table(headings, rows, caption=caption, name="shared", sortable=True)
    missing = facts["part_of_class"].count(len(branches)) - len(rows)
    absent = (
        note(f"{count(missing, 'overlapping class', 'overlapping classes')} had no image in TEST/.") if missing else ""
    )
    return "overlap", "Overlapping classes: which branch answers", f'<p class="lead">{told}</p>{listed}{absent}'


# What the page's script needs to follow the dial.


def live_data(facts: Facts) -> dict[str, Any]:
    test = facts["test"]
    if test["before"] is None:  # a base model: nothing to compare with, nothing along the dial
        return {key: facts["test"][key] for key in ("labels", "known", "before", "answers")} | {
            "classes": facts["classes"]
        }
    drawn = {image for kind in TITLES for image in _drawn(facts, kind)}  # the script finds these in the page
    return {
        "classes": facts["classes"],
        "partOf": facts["part_of_class"],
        "firstBranch": facts["first_branch"],
        "labels": test["labels"],
        "before": test["before"],
        "known": test["known"],
        "answers": test["answers"],
        "speakers": test["speakers"],
        "gallery": test["gallery"],
        "galleries": {kind: test[kind]["images"] for kind in TITLES},
        "pictures": {image: kept for image, kept in test["pictures"].items() if int(image) not in drawn},
    }
