"""Recompute every cell of the pages of results from the files, and check every link.

    python -m benchmarks.paper.audit

Needs the standard library alone and shares no code with the pages, so that one mistake is not made twice.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

LINK = re.compile(r"\[((?:[^\[\]\\]|\\.)*)\]\(([^)\s]+)\)")
GOALS = ("all", "balanced", "avg")
HEADINGS = {"avg over steps": "avg_steps", "new classes alone": "alone", "params (M)": "parameters"}
Row = Mapping[str, Any]


def rounded(value: float | None) -> str:
    return "–" if value is None else str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def with_sign(value: float) -> str:
    text = rounded(round(value, 6)).replace("-", "−")
    return "0.0" if text == "−0.0" else text


# One row.


def seed_values(row: Row, metric: str) -> dict[int, float]:
    """The value of each seed."""
    if metric in ("incremental", "avg_steps"):
        part = "all" if metric == "incremental" else "avg"
        runs = row.get("per_step") or []
        every = [[row["base_model"]] + [step[part] for step in run] for run in runs]
        return {seed: sum(run) / len(run) for seed, run in zip(row["seeds"], every, strict=bool(every))}
    found = {}
    for seed, figures in zip(row.get("seeds") or [], row.get("per_seed") or [], strict=False):
        value = (figures["all"] + figures["avg"]) / 2 if metric == "balanced" else figures.get(metric)
        if value is not None:
            found[seed] = value
    return found


def mean(row: Row, metric: str) -> float | None:
    figures = row["metrics"]
    if metric == "parameters":
        return row["parameters"] / 1e6 if row.get("parameters") else None
    if metric == "alone":
        return row.get("novel_alone")
    if metric == "balanced":
        return None if figures["all"] is None or figures["avg"] is None else (figures["all"] + figures["avg"]) / 2
    value: float | None = figures.get(metric)
    return value


def independent(row: Row, metric: str) -> dict[int, float]:
    """The value of each seed; one value if stage I was not trained again for each."""
    values = seed_values(row, metric)
    if values and row.get("stage1_per_seed", True) is False:
        return {min(values): sum(values.values()) / len(values)}
    return values


def deviation(row: Row, metric: str) -> float | None:
    values = list(independent(row, metric).values())
    if metric in ("parameters", "alone") or len(values) < 2:
        return None
    middle = sum(values) / len(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def shown(row: Row, metric: str) -> str:
    """A cell: the mean, and the standard deviation where there are several seeds."""
    value, spread = mean(row, metric), deviation(row, metric)
    return rounded(value) + (f" ± {rounded(round(spread, 6))}" if value is not None and spread is not None else "")


def part_weight(row: Row, metric: str, part: str) -> tuple[float, float]:
    """The weight of a part in a metric, and its test images."""
    shared = row.get("overlap_classes") or 0
    count = {"base": row["base_classes"] - shared, "novel": row["novel_classes"] - shared, "overlap": shared}
    count = {name: number for name, number in count.items() if number}
    figures, told = row["metrics"], row.get("test_images")
    if row.get("scenario") == "photos":
        new = told * (figures["all"] - figures["base"]) / (figures["novel"] - figures["base"])
        images: dict[str, float] = {"base": told - new, "novel": new}
    else:
        each = told / sum(count.values()) if told else {"glyphs": 10}.get(row["dataset"], 25)
        images = {name: number * each for name, number in count.items()}
    known = [name for name in images if figures.get(name) is not None]
    if metric in known:
        return float(metric == part), images[part]
    times = {name: (row.get("steps") or 1) if name == "novel" else 1 for name in known}
    share, equal = images[part] / sum(images[name] for name in known), times.get(part, 0) / sum(times.values())
    return {"avg": equal, "avg_steps": equal, "balanced": (share + equal) / 2}.get(metric, share), images[part]


def variance_of_images(row: Row, metric: str) -> float:
    """Binomial variance of an accuracy that is a weighted sum of the accuracies of disjoint sets of images."""
    if metric == "alone":
        return float(row["novel_alone"] * (100 - row["novel_alone"]) / (2 * part_weight(row, "novel", "novel")[1]))
    found = 0.0
    for part in ("base", "novel", "overlap"):
        value = row["metrics"].get(part)
        if value is not None:
            weight, images = part_weight(row, metric, part)
            found += weight**2 * value * (100 - value) / images
    return found


def variance_of_difference(first: Row, second: Row, metric: str) -> float:
    """Image by image where both rows say which they predict correctly; otherwise that of one accuracy."""
    both: list[Mapping[str, Sequence[str]]] = [row.get("correct") or {} for row in (first, second)]
    if not both[0] or not both[1] or metric in ("incremental", "avg_steps", "alone"):
        return (variance_of_images(first, metric) + variance_of_images(second, metric)) / 2
    shares = [{part: right_shares(tuple(seeds)) for part, seeds in each.items()} for each in both]
    if {part: len(each) for part, each in shares[0].items()} != {part: len(each) for part, each in shares[1].items()}:
        return (variance_of_images(first, metric) + variance_of_images(second, metric)) / 2
    steps = [part for part in shares[0] if part.startswith("step")]
    found = 0.0
    for part, ours in shares[0].items():
        changes = [100 * (a - b) for a, b in zip(ours, shares[1][part], strict=True)]
        middle = sum(changes) / len(changes)
        spread = sum((change - middle) ** 2 for change in changes) / len(changes)
        name = "novel" if part in steps else part
        weight, images = part_weight(first, metric, name)
        each = len(steps) if part in steps else 1
        found += (weight / each) ** 2 * spread / (images / each)
    return found


@cache
def right_shares(seeds: tuple[str, ...]) -> list[float]:
    """For each image the share of seeds that predict it correctly; bits are packed, the first the highest."""
    bits = []
    for text in seeds:
        count, packed = text.split(":")
        data = b64decode(packed)
        bits.append([data[place // 8] >> (7 - place % 8) & 1 for place in range(int(count))])
    return [sum(image) / len(bits) for image in zip(*bits, strict=True)]


def seed_deviations(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """What drawing seeds with replacement adds to a difference: every ordered draw, equally likely."""

    def draws(values: Sequence[float]) -> list[float]:
        size, middle = len(values), sum(values) / len(values)
        factor = math.sqrt(size / (size - 1))
        return [factor * (sum(drawn) / size - middle) for drawn in product(values, repeat=size)]

    both = [first[seed] - second[seed] for seed in first if seed in second]
    if len(both) > 1:
        return draws(both)
    several = [draws(list(side.values())) for side in (first, second) if len(side) > 1]
    return [a - b for a in several[0] for b in several[-1]] if several else [0.0]


def compared(first: Row, second: Row, metric: str, lead: float = 0.0) -> tuple[float, float, float]:
    """How far the first row is above the second and a `lead`, and the 95% interval of that."""
    margin = (mean(first, metric) or 0) - (mean(second, metric) or 0) - lead
    deviations = seed_deviations(independent(first, metric), independent(second, metric))
    return margin, *limits(margin, deviations, variance_of_difference(first, second, metric))


def limits(margin: float, deviations: list[float], variance: float) -> tuple[float, float]:
    """The 95% interval of a margin, by halving."""
    scale = math.sqrt(2 * variance)
    weights = Counter(round(each, 9) for each in deviations)
    found = []
    for share in (0.025, 0.975):
        low, high = -200.0, 200.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            below = sum(n * (1 + math.erf((middle - each) / scale)) / 2 for each, n in weights.items())
            low, high = (middle, high) if below < share * len(deviations) else (low, middle)
        found.append(margin + high)
    return found[0], found[1]


def verdict_of(low: float, high: float) -> str:
    return "holds" if low > 0 else "does not hold" if high < 0 else "too close to tell"


# The pages.


@dataclass
class Audit:
    """What was checked, and what differs."""

    root: Path
    faults: list[str] = field(default_factory=list)
    cells: int = 0
    links: int = 0
    files: dict[Path, Any] = field(default_factory=dict)
    """Everything under results/, read unless it is given."""

    def __post_init__(self) -> None:
        self.results, self.docs = self.root / "results", self.root / "docs"
        self.paper = json.loads((self.root / "benchmarks" / "paper" / "paper.json").read_text(encoding="utf-8"))
        for path in sorted(self.results.rglob("*.json")) if not self.files else ():
            self.files[path.relative_to(self.results)] = json.loads(path.read_text(encoding="utf-8"))
        self.rows = {
            path: row
            for path, row in self.files.items()
            if isinstance(row, dict) and {"metrics", "dataset"} <= set(row)
        }
        self.folders: dict[Path, list[Path]] = {}
        for path in self.rows:
            self.folders.setdefault(path.parent, []).append(path)
        self.on_other_base = set(self._other_bases())

    def _other_bases(self) -> Iterator[Path]:
        """Rows whose base is not the most common of their folder; rows without a digest go by the base's accuracy.

        Joint training has no base.
        """
        folders: dict[Path, dict[Path, Row]] = {}
        for path, row in self.rows.items():
            if len(path.parts) == 4 and row["method"] != "joint":
                folders.setdefault(path.parent, {})[path] = row
        for rows in folders.values():
            pairs = Counter((row.get("base_model"), row.get("base_weights")) for row in rows.values())
            digests: dict[Any, Any] = {}
            for (accuracy, digest), _ in pairs.most_common():
                if digest:
                    digests.setdefault(accuracy, digest)
            base = {
                path: row.get("base_weights") or digests.get(row.get("base_model"), row.get("base_model"))
                for path, row in rows.items()
            }
            usual = Counter(base.values()).most_common(1)[0][0]
            yield from (path for path in rows if base[path] != usual)

    def same(self, where: str, found: str, expected: str) -> None:
        self.cells += 1
        if found != expected:
            self.faults.append(f"{where}: the page has {found!r}, the files give {expected!r}")

    def file_of(self, page: Path, target: str) -> Path:
        place = (page.parent / unquote(target.partition("#")[0])).resolve()
        return place.relative_to(self.results.resolve())

    def marks(self, path: Path) -> str:
        row = self.rows[path]
        old = " †" if row.get("superseded") or row.get("outdated") else ""
        return old + (" ‡" if path in self.on_other_base else "")

    def linked(self, where: str, page: Path, cell: str, metric: str) -> Path | None:
        """A cell whose number leads to its own file; returns the file."""
        if cell == "–":
            return None
        text, target = LINK.findall(cell)[0]
        path = self.file_of(page, target)
        self.same(where, re.sub(r" (?![†‡]).*", "", cell.partition(")")[2]), self.marks(path))
        self.same(where, text, shown(self.rows[path], metric))
        return path

    def run(self) -> Audit:
        from benchmarks.paper import audit_claims, audit_definitions, audit_figures, audit_screen, audit_tables

        pages = [self.docs / "results.md", *sorted((self.docs / "results").glob("*.md"))]
        for page in pages:
            self.check_links(page)
        audit_tables.check(self, pages)
        for part in (audit_definitions, audit_screen, audit_figures, audit_claims):
            part.check(self)
        self.all_rows()
        return self

    def check_links(self, page: Path) -> None:
        """Every link leads somewhere; one with a file and a key shows the number of that key."""
        text = page.read_text(encoding="utf-8")
        for words, target in LINK.findall(text):
            self.links += 1
            name, _, key = target.partition("#")
            place = (page.parent / unquote(name)).resolve() if name else page
            if re.match(r"[a-z]+:", target) or not place.is_file() or self.root.resolve() not in place.parents:
                self.faults.append(f"{page.name}: the link {target} leads nowhere")
            elif key and place.suffix == ".json":
                row = self.files[place.relative_to(self.results.resolve())]
                found: Any = {**row, **row["metrics"]}
                for part in key.split("."):
                    found = found.get(part) if isinstance(found, dict) else None
                self.same(f"{page.name}, {target}", words, rounded(found))
            elif key and key not in headings(place):
                self.faults.append(f"{page.name}: {place.name} has no heading #{key}")

    def all_rows(self) -> None:
        """The CSV file and the table in rows.html: every row once, every cell."""
        folder = self.docs / "results"
        with (folder / "rows.csv").open(encoding="utf-8", newline="") as file:
            records = list(csv.DictReader(file))
        page = (folder / "rows.html").read_text(encoding="utf-8")
        held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        data = json.loads(held[1].replace("<\\/", "</")) if held else {"columns": [], "rows": []}
        self.same(
            "rows.html", str([dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]), str(records)
        )
        self.same(
            "rows.csv", str(sorted(each["file"] for each in records)), str(sorted(p.as_posix() for p in self.rows))
        )
        for path, row in self.rows.items():
            self.means_are_those_of_seeds(path, row)
        for record in records:
            path = Path(record["file"])
            for name, expected in self.record(path).items() if path in self.rows else ():
                self.same(f"rows.csv, {path}, {name}", record[name], expected)

    def means_are_those_of_seeds(self, path: Path, row: Row) -> None:
        """A row agrees with itself: each mean and each deviation is that of its seeds, but for rounding."""
        allowed = 0.011 if row.get("scenario") == "photos" else 0.0016
        for metric, told in (row.get("std") or {}).items():
            seeds = list(seed_values(row, metric).values())
            if len(seeds) < 2:
                continue
            self.cells += 1
            found = statistics.stdev(seeds)
            if abs(found - told) > allowed:
                self.faults.append(f"{path}: std of {metric} is {told}, and that of its seeds {found}")
        for metric, value in row["metrics"].items():
            values = list(seed_values(row, metric).values())
            self.cells += bool(values)
            if values and abs(sum(values) / len(values) - value) > allowed:
                self.faults.append(
                    f"{path}: {metric} is {value}, and the mean of its seeds {sum(values) / len(values)}"
                )

    def record(self, path: Path) -> dict[str, str]:
        row, photos = self.rows[path], self.rows[path].get("scenario") == "photos"
        settings = row.get("settings") or {}
        other = "another training of the base" if path in self.on_other_base else ""
        name = path.stem.replace("-", " ") if photos else row.get("label") or row["method"]
        found = {
            "dataset": row["dataset"], "experiment": "photos" if photos else path.parts[1], "network": row["arch"],
            "method": name, "point": row.get("point") or "chosen",
            "base model": rounded(row["before"] if photos else row.get("base_model")),
            "params (M)": rounded(mean(row, "parameters")), "classes": f"{row['base_classes']}+{row['novel_classes']}",
            "seeds": " ".join(str(seed) for seed in row.get("seeds") or ()),
            "exemplars": str(settings.get("exemplars", "")), "split": str(settings.get("split", "")),
            "superseded": f"{row.get('superseded') or row.get('outdated') or ''} {other}".strip(),
            "hardware": row["hardware"], "commit": row.get("commit", ""), "command": row.get("command", ""),
        }  # fmt: skip
        for goal in GOALS:
            found[f"two-fold {goal}"] = rounded((row.get("two_fold") or {}).get(goal))
        for metric in ("all", "incremental"):
            found[f"both halves {metric}"] = rounded((row.get("both_halves") or {}).get(metric))
        for metric in ("all", "base", "novel", "overlap", "avg", "balanced", "incremental", "avg_steps", "alone"):
            value, _, spread = shown(row, metric).partition(" ± ")
            found |= {metric: value, f"{metric} ±": spread}
        return {name: "" if value == "–" else value for name, value in found.items()}


def headings(page: Path) -> set[str]:
    found = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def tables_of(page: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Every table of a page: the last heading above it, its column headings, its lines."""
    title, lines = "", []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("#"):
            title = line.lstrip("# ")
        if line.startswith("|"):
            lines.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif lines:
            yield title, lines[0], lines[2:]
            lines = []


def main() -> None:
    root = Path(__file__).parents[2]
    found = Audit(root).run()
    print("\n".join(found.faults[:50]))
    print(f"{found.cells:,} cells and {found.links:,} links checked; {len(found.faults)} differ")
    sys.exit(bool(found.faults))


if __name__ == "__main__":
    main()
