"""Every row as CSV, and as one HTML file with a table to sort and filter, which needs no network."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.paper.rows import GOALS, Row, Rows
from branchout.bench.rows import number

TEMPLATE = Path(__file__).with_name("rows.html")
METRICS = ("all", "base", "novel", "overlap", "avg", "balanced", "incremental", "avg_steps", "alone")
COLUMNS = (
    "dataset", "experiment", "network", "method", "point",
    *(part for metric in METRICS for part in (metric, f"{metric} ±")),
    *(f"two-fold {goal}" for goal in GOALS), "both halves all", "both halves incremental",
    "base model", "params (M)", "classes", "seeds", "exemplars", "split",
    "superseded", "hardware", "commit", "command", "file",
)  # fmt: skip


def records(rows: Rows) -> Iterator[dict[str, str]]:
    """One record for each row; numbers with one decimal, as on the pages."""
    ordered = sorted(rows.values(), key=lambda row: row.data["dataset"] == "glyphs")
    for row in sorted(ordered, key=lambda row: row.data.get("scenario") != "photos"):
        yield dict(zip(COLUMNS, _cells(row), strict=True))


def _cells(row: Row) -> Iterator[str]:
    data, settings = row.data, row.data.get("settings") or {}
    photos = data.get("scenario") == "photos"
    yield from (data["dataset"], "photos" if photos else row.path.parts[1], data["arch"])
    yield from (row.label, data.get("point") or "chosen")
    for metric in METRICS:
        spread = row.spread(metric)
        yield _shown(row.value(metric))
        yield _shown(None if spread is None or row.value(metric) is None else round(spread, 6))
    two_fold = data.get("two_fold") or {}
    yield from (_shown(two_fold.get(goal)) for goal in GOALS)
    both = data.get("both_halves") or {}
    yield from (_shown(both.get(metric)) for metric in ("all", "incremental"))
    yield _shown(data.get("before") if photos else data.get("base_model"))
    yield _shown(row.value("parameters"))
    yield f"{data['base_classes']}+{data['novel_classes']}"
    yield " ".join(map(str, data.get("seeds") or ()))
    yield str(settings.get("exemplars", ""))
    yield str(settings.get("split", ""))
    yield " ".join(filter(None, (row.old, "another training of the base" if row.other_base else None)))
    yield from (data["hardware"], data.get("commit", ""), data.get("command", ""), row.path.as_posix())


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)


def as_csv(rows: Rows) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(rows))
    return text.getvalue()


def as_html(rows: Rows) -> str:
    lines = [list(record.values()) for record in records(rows)]
    data = json.dumps({"columns": COLUMNS, "rows": lines}, ensure_ascii=False, separators=(",", ":"))
    return TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", data.replace("</", "<\\/"))
