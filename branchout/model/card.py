"""What a model folder says about itself: its manifest, and the model card (README.md) written from it.

Nothing here needs torch, so that another operating point is chosen without loading the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from branchout import files, units
from branchout.errors import BranchoutError
from branchout.goals import CHOSEN_ON, METRICS
from branchout.model.manifest import BASE_FILE, MANIFEST, check_manifest, fusion_file, step_file

TEMPLATE = Path(__file__).parent.parent / "assets" / "model-card.md"
STATISTICS = ("running_mean", "running_var")
"""Tensors of floating-point numbers that are no parameters: BatchNorm's."""
SIZES: dict[str, tuple[str, Callable[[int], str]]] = {
    "branches": ("step branches", str),
    "parameters": ("parameters", units.parameters),
    "bytes": ("weights on disk", units.size),
}
"""What the history keeps of a model before and after its compaction, in words."""


def describe(manifest: Mapping[str, Any], folder: Path) -> None:
    """Write the model card and the manifest; the manifest last, because it makes the folder a model."""
    check_manifest(manifest, folder / MANIFEST)
    files.write_text(folder / "README.md", model_card(manifest, parameter_counts(manifest, folder)))
    files.write_json(folder / MANIFEST, manifest)


def with_point(manifest: Mapping[str, Any], point: int, goal: str) -> dict[str, Any]:
    """The manifest with another operating point after the last step."""
    *earlier, last = manifest["fusions"]
    return {**manifest, "fusions": [*earlier, {**last, "point": point, "goal": goal}]}


def compaction_rows(event: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Size and accuracy before → after, as the history records them of a compaction; of other events nothing."""
    sizes = event.get("sizes", {})
    if event.get("what") != "compact" or sizes is None:  # None: of several branches, the last one tells
        return []
    sizes = sizes or {  # which older models lack
        "before": {"branches": event.get("steps", 0)},
        "after": {"branches": event.get("branches", 0)},
    }
    rows = [
        (words, shown(sizes["before"][key]), shown(sizes["after"][key]))
        for key, (words, shown) in SIZES.items()
        if key in sizes["before"]
    ]
    before, after = event.get("before") or {}, (event.get("measured") or {}).get("after") or {}
    measured = [name for name in METRICS if before.get(name) is not None and after.get(name) is not None]
    return rows + [
        (f"{name} accuracy in %", units.percent(before[name]), units.percent(after[name])) for name in measured
    ]


def parameter_counts(manifest: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """What `Classifier.parameter_counts` counts, from the headers of the weights files."""
    steps = len(manifest["steps"])
    counts = {"base": 0, **{f"step {n}": 0 for n in range(1, steps + 1)}, "heads": 0, "deltas": 0}
    for part, name in {"base": BASE_FILE, **{f"step {n}": step_file(n) for n in range(1, steps + 1)}}.items():
        for key, count in _sizes(folder / name).items():
            if key.startswith("means/") and part != f"step {steps}":
                continue  # of the step before the last: for "before → after" only
            kind = {"head": "heads", "means": "heads", "correction": "deltas"}.get(key.partition("/")[0], part)
            counts[kind] += count
    if steps and manifest["fusions"][-1]["deltas"]:
        counts["deltas"] += sum(_sizes(folder / fusion_file(steps)).values()) // manifest["fusions"][-1]["deltas"]
    return counts


def _sizes(path: Path) -> dict[str, int]:
    """How many numbers each tensor of a file has, without whole numbers and statistics."""
    try:
        with safe_open(path, "numpy") as file:
            tensors = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 – it is not a dictionary
            return {
                key: math.prod(tensor.get_shape())
                for key, tensor in tensors.items()
                if "F" in tensor.get_dtype() and not key.endswith(STATISTICS)
            }
    except (SafetensorError, OSError) as error:
        raise BranchoutError(f"{path} cannot be read: {error}. Copy the whole folder again") from None


def model_card(manifest: Mapping[str, Any], parameters: Mapping[str, int]) -> str:
    """Markdown, with the metadata block that model hubs read."""
    from jinja2 import Environment

    known: set[str] = set()
    parts = []
    for number, names in enumerate(manifest["classes"]):
        name = f"step {number}" if number else "base"
        parts.append({"name": name, "classes": len(names), "new": len(set(names) - known)})
        known.update(names)
    compacted = [number for number, event in enumerate(manifest["history"]) if compaction_rows(event)]
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        manifest,
        known=len(known),
        parts=parts,
        parameters=parameters,
        metrics=METRICS,
        compaction=compaction_rows(manifest["history"][compacted[-1]]) if compacted else [],
        steps_since=len(manifest["history"]) - 1 - compacted[-1] if compacted else 0,
        measured_on=CHOSEN_ON,
        setting=units.setting,
    )
