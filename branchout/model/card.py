"""What a model folder says about itself: its manifest, and the model card (README.md) written from it.

Nothing here needs torch, so that another operating point is chosen without loading the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from branchout import files
from branchout.errors import BranchoutError
from branchout.model.manifest import BASE_FILE, MANIFEST, check_manifest, fusion_file, step_file

STATISTICS = ("running_mean", "running_var")
"""Tensors of floating-point numbers that are no parameters: BatchNorm's."""


def describe(manifest: Mapping[str, Any], folder: Path) -> None:
    """Write the model card and the manifest; the manifest last, because it makes the folder a model."""
    check_manifest(manifest, folder / MANIFEST)
    files.write_text(folder / "README.md", model_card(manifest, parameter_counts(manifest, folder)))
    files.write_json(folder / MANIFEST, manifest)


def with_point(manifest: Mapping[str, Any], point: int, goal: str) -> dict[str, Any]:
    """The manifest with another operating point after the last step."""
    *earlier, last = manifest["fusions"]
    return {**manifest, "fusions": [*earlier, {**last, "point": point, "goal": goal}]}


def parameter_counts(manifest: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """What `Classifier.parameter_counts` counts, from the headers of the weights files."""
    steps = len(manifest["steps"])
    counts = {"base": 0, **{f"step {n}": 0 for n in range(1, steps + 1)}, "heads": 0, "deltas": 0}
    for part, name in {"base": BASE_FILE, **{f"step {n}": step_file(n) for n in range(1, steps + 1)}}.items():
        for key, count in _sizes(folder / name).items():
            counts["heads" if key.startswith("head/") else part] += count
    if steps and manifest["fusions"][-1]["deltas"]:
        counts["deltas"] = sum(_sizes(folder / fusion_file(steps)).values()) // manifest["fusions"][-1]["deltas"]
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


def model_card(about: Mapping[str, Any], parameters: Mapping[str, int]) -> str:
    """Markdown, with the metadata block that model hubs read."""
    base, *steps = about["classes"]
    known = list(dict.fromkeys(name for names in about["classes"] for name in names))
    arch = about["arch"]
    lines = [
        "---",
        "library_name: branchout",
        "pipeline_tag: image-classification",
        "tags: [image-classification, class-incremental-learning]",
        "---",
        "",
        f"# A classifier of {len(known):,} classes",
        "",
        f"Base: {arch['name']} with {len(base):,} classes. "
        + (
            f"{len(steps)} step{'s' * (len(steps) > 1)} added more; the base's weights were not changed."
            if steps
            else ""
        ),
        "",
        "| part | classes | new | parameters |",
        "|---|---:|---:|---:|",
        f"| base | {len(base):,} | {len(base):,} | {parameters['base']:,} |",
    ]
    seen = set(base)
    for number, names in enumerate(steps, 1):
        fresh = [name for name in names if name not in seen]
        seen.update(names)
        lines.append(f"| step {number} | {len(names):,} | {len(fresh):,} | {parameters[f'step {number}']:,} |")
    lines += ["", f"Heads have {parameters['heads']:,} parameters, deltas between branches {parameters['deltas']:,}."]
    size = about["preprocessing"]["size"]
    lines += ["", f"Input: {size}×{size} pixels, {about['preprocessing']['channels']} channel(s)."]
    for number, fusion in enumerate(about["fusions"], 1):
        lines += ["", f"## Operating point after step {number}", "", *_operating_point(fusion)]
        event = about["history"][number] if len(about["history"]) > number else {}
        figures = (event.get("measured") or {}).get("goals", {}).get(fusion["goal"])
        if figures and figures["point"] == fusion["point"]:
            lines += ["", *_measured(event["measured"]["before"], figures)]
    if about["history"]:
        lines += ["", "## How it was made", ""]
        lines += [f"{n}. {_event(event)}" for n, event in enumerate(about["history"], 1)]
    lines += [
        "",
        "Use it: `branchout predict FOLDER photo.jpg`. Change its operating point: `branchout tune FOLDER --goal avg`.",
        "",
    ]
    return "\n".join(lines)


def _operating_point(fusion: Mapping[str, Any]) -> list[str]:
    frontier, point = fusion["frontier"], fusion["point"]
    setting = frontier["settings"][point]
    place = (
        f"dial at b = {setting[0]:+.3f}" if frontier["kind"] == "dial" else f"α = {setting[0]:g}, β = {setting[1]:g}"
    )
    figures = {name: values[point] for name, values in frontier["figures"].items() if values[point] is not None}
    where = {
        "dev": f"{frontier['images']:,} dev images",
        "held-out": f"{frontier['images']:,} images held out from training",
        "pseudo": "pseudo-exemplars generated from the head's weights, which do not measure base accuracy",
    }[frontier["measured"]]
    listed = ", ".join(f"{name} {100 * value:.1f}%" for name, value in figures.items())
    return [f"Goal `{fusion['goal']}`: {place}. Chosen on {where}: {listed}."]


def _measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Accuracy before and after on held-out test images; before only where both are over the same images."""
    lines = ["| accuracy on held-out test images | before | after |", "|---|---:|---:|"]
    for name in ("all", "base", "novel", "overlap", "avg"):
        if after.get(name) is not None:
            old = before.get(name) if name in ("base", "overlap") else None
            lines.append(f"| {name} | {'' if old is None else f'{100 * old:.1f}%'} | {100 * after[name]:.1f}% |")
    return lines


def _event(event: Mapping[str, Any]) -> str:
    facts = ", ".join(
        f"{key} {value}" for key, value in event.items() if isinstance(value, str | int) and key != "what"
    )
    return f"{event.get('what', 'made')}: {facts}" if facts else str(event.get("what", "made"))
