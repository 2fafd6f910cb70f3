"""The report: one HTML file that needs no network, drawn from the facts of `gather`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from branchout.errors import BranchoutError
from branchout.files import atomic_write, check_output
from branchout.report import added, tested
from branchout.report.markup import change, command, count, named, note, percent, text
from branchout.report.points import FIGURES, axes_of, operating_points, setting, tune_command

Facts = Mapping[str, Any]
GENERATOR = "Branchout report"
"""By this mark in its head a file is known as a report, which may be written over."""
MEANING = {
    "base": "classes the base alone knows",
    "novel": "classes only steps know",
    "overlap": "known before, in a new look",
    "all": "every image counts the same",
    "avg": "every part counts the same",
}
LIVE_BYTES = 2_000_000
"""Answers of more images than fit into this stay out of the page: its dial then moves accuracies alone."""


def static_file(name: str) -> str:
    """The stylesheet `style.css` or the script `script.js`, which the report file and the served page share."""
    return (files("branchout.report") / "static" / name).read_text(encoding="utf-8")


def served_page() -> str:
    """The page that `branchout serve` answers at /; it loads /style.css and /script.js."""
    return (files("branchout.report") / "templates" / "served.html").read_text(encoding="utf-8")


def render(facts: Facts) -> str:
    """The page."""
    style, script = static_file("style.css"), static_file("script.js")
    told = parts(facts, most=LIVE_BYTES)
    template = (files("branchout.report") / "templates" / "report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        generator=GENERATOR,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'",
        title=text(f"{facts['name']}: report"),
        style=style,
        header=told["header"],
        contents=told["contents"],
        sections=told["sections"],
        dial=told["dial"],
        footer=_footer(facts),
        data=json.dumps(told["data"], ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )


def parts(facts: Facts, *, most: int | None = None) -> dict[str, Any]:
    """What any page about the facts is made of: `header`, `contents`, `sections` and `dial` as markup, and the `data`
    that the script reads. Beyond `most` bytes of answers only accuracies follow the dial."""
    data = _live_data(facts, most)
    everything = [
        added.steps(facts),
        operating_points(facts),
        *tested.sections(facts),
        added.training(facts),
        added.sizes(facts),
    ]
    sections = [(key, title, body) for key, title, body in everything if body]
    return {
        "header": _header(facts),
        "contents": "".join(f'<li><a href="#{key}">{text(title.split(":")[0])}</a></li>' for key, title, _ in sections),
        "sections": "\n".join(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{text(title)}</h2>{body}</section>'
            for key, title, body in sections
        ),
        "dial": _dial(data),
        "data": data,
    }


def beside(folder: Path) -> Path:
    """Where the report of a saved model lies if nobody says otherwise."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}-report.html")


def check_report(out: Path) -> Path:
    """The place for a report, if it is free or holds an earlier one; asked before the work."""
    if out.is_dir():
        raise BranchoutError(f"{out} is a folder, and a report is one file; try: --out {out / 'report.html'}")
    check_output(out)
    if out.exists():
        with out.open("rb") as file:
            ours = GENERATOR.encode() in file.read(1000)
        if not ours:
            raise BranchoutError(f"{out} is there already and is no report; choose another --out, or remove it first")
    return out


def write(page: str, out: Path) -> None:
    with atomic_write(out) as partial:
        partial.write_text(page, encoding="utf-8")


def _hash(script: str) -> str:
    """So that the browser runs this very script and no other, whatever a name may hold."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


# The head of the page: what happened, in five numbers.


def _header(facts: Facts) -> str:
    base, *steps = facts["branches"]
    new, again = (sum(len(step[key]) for step in steps) for key in ("new", "known"))
    told = f"{count(len(base['new']), 'class', 'classes')} of the base"
    if steps:
        told += f", {count(new, 'new one')} in {count(len(steps), 'step')}"
        told += f", {count(again, 'known class', 'known classes')} in a new look" if again else ""
    lines = [f"<h1>{named(facts['name'])}</h1>", f'<p class="lead">{told}.</p>']
    after, before, whence = _headline(facts)
    tiles = [
        _tile(name, before.get(name) if name in ("base", "overlap") else None, after[name], facts["test"] is not None)
        for name in MEANING
        if after.get(name) is not None
    ]
    if tiles:
        lines.append(f'<dl class="tiles">{"".join(tiles)}</dl>')
    return "".join([*lines, '<p id="moved" class="note" hidden></p>', *map(note, whence)])


def _tile(name: str, before: float | None, after: float, live: bool) -> str:
    marks = f' data-figure="{name}" data-on="test"' if live else ""
    earlier = ""
    if before is not None:
        delta = f'<span class="delta" data-from="{before}"{marks}>{change(before, after)}</span>'
        earlier = f'<span class="earlier">{percent(before)} before, {delta}</span>'
    return (
        f'<div class="tile"><dt>{name} <small>{MEANING[name]}</small></dt>'
        f"<dd><b{marks}>{percent(after)}</b><span>%</span>{earlier}</dd></div>"
    )


def _headline(facts: Facts) -> tuple[Facts, Facts, list[str]]:
    """Accuracies after and before, and sentences that say where they come from."""
    test, frontier, measured = facts["test"], facts["frontier"], facts["measured"]
    if test is not None:
        saved = frontier["saved"] if frontier else 0
        after = {name: values[saved] for name, values in test["figures"].items()}
        told = [f"Accuracy on {count(test['images'], 'labelled image')} given for this report."]
        absent = [name for name in ("base", "novel", "overlap") if after[name] is None and _has_part(facts, name)]
        told += [f"No image among them is of the part “{name}”, so it was not measured." for name in absent]
        return after, test["figures_before"] or {}, told
    more = (
        f"For every class, every confusion and the pictures themselves: {command(facts['command'])}, where TEST/ holds "
        "labelled images, one folder per class."
    )
    if frontier is None:
        accuracy = facts["branches"][0]["event"].get("accuracy")
        told = ["This is a base model: no step has added anything yet."]
        if accuracy is not None:
            told.append(f"{percent(accuracy)}% right on its validation images, its history says.")
        return {}, {}, [*told, more]
    told = []
    pseudo = frontier["measured"] == "pseudo"
    if pseudo:
        told.append(
            "<strong>Base accuracy was not measured</strong>: no image of the old classes was given. The operating "
            "point was placed with stand-ins made from the base’s own weights."
        )
    before: Facts = {}
    if measured and measured["after"]:
        after, before = {name: measured["after"].get(name) for name in FIGURES}, measured["before"]
        whose = "new images" if pseudo else "images"
        told.append(f"Accuracy on {measured['images']:,} {whose} that chose nothing, set aside by <code>extend</code>.")
        if frontier["measured"] == "held-out":
            told.append(
                "They were held out from the images given. Old images that were kept probably trained the base, so its "
                "accuracy looks better here than on images it never saw."
            )
    else:
        after = {name: values[frontier["saved"]] for name, values in frontier["figures"].items()}
        told.append(
            f"Accuracy on the {frontier['images']:,} images that chose this operating point, which flatters it."
        )
    if pseudo:
        after = {**after, "base": None, "all": None, "avg": None}  # without old images they would mean something else
    return after, before, [*told, more]


def _has_part(facts: Facts, name: str) -> bool:
    """Whether any class is in a part; novel are the parts of all steps."""
    steps = len(facts["branches"]) - 1
    numbers = {"base": [0], "novel": range(1, steps + 1), "overlap": [steps + 1]}[name]
    return any(part in numbers for part in facts["part_of_class"])


def _footer(facts: Facts) -> str:
    made = f"Made on {text(facts['made'])} by" if facts["made"] else "Made by"
    return f"<p>{made} Branchout {text(facts['version'])}. This file needs no network and asks for none.</p>"


# The dial.


def _live_data(facts: Facts, most: int | None) -> dict[str, Any]:
    """What the page's script reads: figures along the dial, and every image's answers where they fit."""
    frontier, test = facts["frontier"], facts["test"]
    if frontier is None:
        return tested.live_data(facts) if test is not None and most is None else {}
    data = {
        "kind": frontier["kind"],
        "points": [setting(frontier, point) for point in range(len(frontier["settings"]))],
        "numbers": frontier["numbers"],
        "saved": frontier["saved"],
        "tune": [goal and tune_command(facts, goal) for goal in frontier["reach"]],
        "axes": axes_of(facts),
        "dev": frontier["figures"],
        "test": None,
    }
    if test is None:
        return data
    live = tested.live_data(facts)
    answers = {key: value for key, value in live.items() if key != "pictures"}
    fits = most is None or len(json.dumps(answers, separators=(",", ":"))) <= most
    return {**data, "test": test["figures"], **(live if fits else {})}


def _dial(data: Facts) -> str:
    if len(data.get("points", ())) < 2:
        return ""
    follow = "every number and picture on this page follows" if "labels" in data else "the accuracies follow"
    return (
        f'<form id="dial" hidden><label for="at">{"Dial" if data["kind"] == "dial" else "Point"}</label>'
        f'<input type="range" id="at" min="0" max="{len(data["points"]) - 1}" step="1" value="{data["saved"]}" '
        f'aria-describedby="dial-help"><output for="at"></output><button type="button">as saved</button>'
        f'<p id="dial-help">From favouring old classes to favouring new ones: {follow}.</p></form>'
    )
