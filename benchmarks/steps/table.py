"""The tables of docs/research.md, written between two marks from the rows there are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.steps.ladder import LADDER, NO_CORRECTIONS, RUNGS, label_of
from branchout.bench.rows import number, read_row
from branchout.errors import BranchoutError
from branchout.files import write_text
from branchout.goals import PAPER_GOALS

PAGE = Path("docs/research.md")
START, END = "<!-- ladder: written by python -m benchmarks.steps -->", "<!-- end of ladder -->"


def write(page: Path, results: Path) -> None:
    """Replace the tables of a page."""
    before, after = around(page)
    write_text(page, f"{before}{START}\n\n{tables(results)}\n{END}{after}")


def around(page: Path) -> tuple[str, str]:
    """The text of a page before and after its tables."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if text.count(START) != 1 or text.count(END) != 1:
        raise BranchoutError(f"{page} has no place for the tables: expected the lines {START} and {END}")
    before, rest = text.split(START)
    return before, rest.split(END)[1]


def tables(results: Path) -> str:
    found = {path.name for path in results.glob("steps/*") if path.is_dir()}
    return "\n".join(line for name in sorted(found) for line in lines(results, name))


def lines(results: Path, experiment: str) -> Iterator[str]:
    """One table: ours, the rungs with their distance from ours, joint training, the candidates, and what was measured
    without corrections, with its distance from ours without them."""
    folder = results / "steps" / experiment
    every = [name + suffix for suffix in ("", NO_CORRECTIONS) for name in RUNGS]
    rows = {name: read_row(path) for name in every if (path := folder / f"{name}.json").exists()}
    ours = next((name for name in ("ours", f"ours{NO_CORRECTIONS}") if name in rows), None)
    if ours is not None:
        rows = {ours: rows[ours], **rows}
    first = next(iter(rows.values()), None)
    if first is None:
        return
    width = first["settings"].get("width")
    made = dict.fromkeys(
        f"seeds {', '.join(map(str, row['seeds']))}, commit {row['commit']}, {row['hardware']}" for row in rows.values()
    )
    yield f"### {experiment}"
    yield ""
    yield _wrapped(
        f"{first['base_classes']} + {first['steps']} × {first['novel_classes'] // first['steps']} classes, "
        f"{first['settings']['exemplars']} exemplars a class{f', width {width}' if width else ''}; "
        f"base {number(first['base_model'])}%. Measured with {'; '.join(made)}."
    )
    yield ""
    yield "| | all | balanced | avg | against ours |"
    yield "|---|---|---|---|---|"
    without = rows.get(f"ours{NO_CORRECTIONS}")
    compared = rows.get(ours or "")
    shown = [
        _line(
            _link(label_of(name), folder / f"{name}.json", results),
            row,
            without if name.endswith(NO_CORRECTIONS) and row is not without else compared,
        )
        for name, row in rows.items()
    ]
    told = list(rows.values())
    place = _joint(results, first)
    if place is not None:
        after = sum(name in LADDER or name == ours for name in rows)
        told.append(read_row(place))
        linked = _link("joint training with the same dial", place, results)
        shown.insert(after, _line(linked, told[-1], compared))
    yield from shown
    yield ""
    reasons = dict.fromkeys(row["outdated"] for row in told if "outdated" in row)
    if reasons:
        yield _wrapped(f"† To be measured again: {'; '.join(reasons)}.")
        yield ""
    missing = [rung.label for name, rung in LADDER.items() if not {name, name + NO_CORRECTIONS} & rows.keys()]
    if missing:
        yield _wrapped(f"Not measured: {'; '.join(missing)}.")
        yield ""


def _line(label: str, row: Mapping[str, Any], ours: Mapping[str, Any] | None) -> str:
    folds = row["two_fold"]
    cells = [number(folds[goal]) for goal in PAPER_GOALS]
    against = ""
    if ours is not None and row is not ours:
        against = " / ".join(f"{folds[goal] - ours['two_fold'][goal]:+.1f}" for goal in PAPER_GOALS).replace("-", "−")
    mark = " †" if "outdated" in row else ""
    return f"| {label}{mark} | {' | '.join(cells)} | {against} |"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _link(label: str, row: Path, results: Path) -> str:
    return f"[{label}](../results/{row.relative_to(results).as_posix()})"


def _joint(results: Path, like: Mapping[str, Any]) -> Path | None:
    """The file of joint training in Table 2, or in Table 1 for one step, if it is of the same classes."""
    table = "multistep" if like["steps"] > 1 else "disjoint-40"
    path = results / like["dataset"] / table / like["arch"] / "joint-dial-balanced.json"
    if like["settings"]["split"] != 1 or not path.exists():
        return None
    found = read_row(path)
    return path if all(found[key] == like[key] for key in ("base_classes", "novel_classes", "steps")) else None
