"""The part of the report that the model's own history fills: what was added, how it was trained, what it weighs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from branchout.report import charts
from branchout.report.markup import duration, named, note, parameters, percent, row, size, table, text

Facts = Mapping[str, Any]
Section = tuple[str, str, str]
CHOSEN = {
    "dev": "images given for it",
    "held-out": "images held out",
    "pseudo": "new images and stand-ins for old ones",
}
STAGES = {"stage1": "stage I", "fusion": "stage II", "choice": "choosing and measuring", "training": "training"}


def steps(facts: Facts) -> Section:
    """The base and every step in their order."""
    items = []
    for number, branch in enumerate(facts["branches"]):
        when = branch["event"].get("when")
        stamp = f' <time datetime="{text(when)}">{text(_readable(when))}</time>' if when else ""
        details = "".join(f"<div><dt>{text(key)}</dt><dd>{value}</dd></div>" for key, value in _how(branch))
        names = _listed("new classes" if number else "classes", branch["new"]) + _listed(
            "known already", branch["known"]
        )
        title = text(branch["name"].capitalize())
        items.append(f'<li><h3>{title}{stamp}</h3><dl class="facts">{details}</dl>{names}</li>')
    return "added", "What was added", f'<ol class="history">{"".join(items)}</ol>'


def _readable(when: str) -> str:
    day, _, hour = when.partition("T")
    return f"{day} {hour.removesuffix('+00:00')[:5]}{' UTC' if when.endswith('+00:00') else ''}".strip()


def _how(branch: Facts) -> list[tuple[str, str]]:
    """What the history says of the base or of a step, in words; values are markup."""
    event = branch["event"]
    told: list[tuple[str, str]] = []
    if event.get("what") == "opened":
        told.append(("from", named(event.get("base", "?"))))
    if "images" in event:
        told.append(("images", f"{event['images']:,}"))
    if "exemplars kept" in event:
        kept = event["exemplars kept"]
        told.append(("old images kept", f"{kept:,}" if kept else "none; stand-ins were made from the base’s weights"))
    if branch["where"]:
        told.append(("cloned", "nothing" if branch["where"] == "fc" else text(branch["where"])))
    if "chosen on" in event:
        told.append(("chosen on", named(CHOSEN.get(event["chosen on"], event["chosen on"]))))
    plain = ("recipe", "goal", "epochs", "views", "seed", "version")
    told += [(key, named(event[key])) for key in plain if event.get(key) is not None]
    if event.get("accuracy") is not None:
        told.append(("accuracy", f"{percent(event['accuracy'])}% on its validation images"))
    return told


def _listed(title: str, names: list[str]) -> str:
    if not names:
        return ""
    inner = ", ".join(named(name) for name in names)
    return f"<details><summary>{len(names):,} {title}</summary><p>{inner}</p></details>"


def training(facts: Facts) -> Section:
    drawn = [
        f"<figure><figcaption>{text(branch['name'].capitalize())}: mean loss of each epoch of stage I</figcaption>"
        f"{charts.curve(branch['losses'], title=branch['name'])}</figure>"
        for branch in facts["branches"]
        if branch["losses"]
    ]
    return "training", "Training", f'<div class="curves">{"".join(drawn)}</div>' if drawn else ""


def sizes(facts: Facts) -> Section:
    held, on_disk = facts["sizes"]["parameters"], facts["sizes"]["files"]
    rows = []
    for number, branch in enumerate(facts["branches"]):
        file = on_disk.get(f"step-{number}.safetensors" if number else "base.safetensors")
        cells = [
            ("name", text(branch["name"])),
            ("number", f"{len(branch['new']) + len(branch['known']):,}"),
            ("number", parameters(held.get(branch["name"], 0))),
            ("number", size(file) if file else "–"),
            ("name", _times(branch["seconds"])),
        ]
        rows.append(row(cells))
    headings = [
        ("part", "name"),
        ("classes", "number"),
        ("parameters", "number"),
        ("on disk", "number"),
        ("time", "name"),
    ]
    listed = table(headings, rows, caption="What each part holds and took")
    return "sizes", "Sizes and times", listed + note(_built(facts["about"], held, on_disk))


def _times(seconds: Any) -> str:
    parts = seconds if isinstance(seconds, Mapping) else {"training": seconds} if seconds else {}
    told = [f"{STAGES.get(key, text(key))} {duration(value)}" for key, value in parts.items()]
    return ", ".join(told) or "not recorded"


def _built(about: Facts, held: Facts, on_disk: Mapping[str, int]) -> str:
    arch = about["arch"]
    width = f", width {text(arch['width'])}" if arch.get("width") else ""
    colour = "grey" if about["channels"] == 1 else "colour"
    fused = sum(size_ for name, size_ in on_disk.items() if name.startswith("fusion"))
    deltas = f" ({size(fused)} on disk)" if fused else ""
    total = f" In all {size(sum(on_disk.values()))} on disk." if on_disk else ""
    return (
        f"{named(arch.get('name', '?'))}{width}; input {about['size']}×{about['size']} pixels, {colour}; "
        f"pooler {text(about['pooler'])}. Heads have {parameters(held['heads'])} parameters, deltas between branches "
        f"{parameters(held['deltas'])}{deltas}.{total}"
    )
