"""Commands that show data and draw scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from branchout.cli import options
from branchout.cli.app import app, console, open_dataset, open_model, say
from branchout.cli.display import new_table, progress
from branchout.errors import unknown
from branchout.files import check_output

if TYPE_CHECKING:
    from branchout.data.samples import Samples


@app.command(epilog="Example: branchout data photos/ --sheet sheet.png")
def data(
    data: options.Data,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet to this image file.")] = None,
    classes: Annotated[int, typer.Option(min=1, help="How many classes the sheet shows.")] = 60,
    classes_from: options.ClassesFrom = None,
) -> None:
    """Show what is in a dataset: classes, counts, sizes, problems."""
    import numpy as np

    from branchout.data.contact_sheet import contact_sheet

    if sheet:
        check_output(sheet, such_as="sheet.png")
    dataset = open_dataset(data, classes_from=classes_from)
    headings = ("", "classes", "images", "fewest", "median", "most", "pixels")
    table = new_table(*headings, title=Text(dataset.name))
    for name, samples in (("train", dataset.train), ("val", dataset.val)):
        counts = sorted(samples.counts().values())
        table.add_row(
            name,
            f"{len(samples.classes):,}",
            f"{len(samples):,}",
            *(f"{n:,}" for n in (counts[0], int(np.median(counts)), counts[-1])),
            _sizes(samples),
        )
    console.print(table)
    for attribute in dataset.train.attributes:
        values, counts_of = np.unique(dataset.train.attributes[attribute], return_counts=True)
        listed = ", ".join(f"{v} {n:,}" for v, n in zip(values[:8], counts_of, strict=False))
        say(f"{attribute}: {listed}{', …' if len(values) > 8 else ''}")
    if sheet:
        shown = contact_sheet(dataset.train, sheet, classes=classes)
        say(f"{shown} of {len(dataset.train.classes):,} classes are shown in {sheet}")


def _sizes(samples: Samples) -> str:
    """The common size of all images, or the smallest, median and largest."""
    import numpy as np

    if samples.pixels.shape is not None:
        height, width, _ = samples.pixels.shape
        return f"{width}×{height}"
    shapes = getattr(samples.pixels, "shapes", None)
    if shapes is None:
        return "not measured"
    sizes = shapes[:, :2]
    ordered = sizes[samples.rows][np.argsort(sizes[samples.rows].prod(1))]
    return " … ".join(f"{w}×{h}" for h, w in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))


@app.command(epilog="Example: branchout scenario disjoint photos/ --novel 10 --out disjoint.json")
def scenario(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="disjoint, steps, overlap-style, …; an unknown name lists them all.")
    ],
    data: options.Data,
    base: Annotated[int | None, typer.Option(help="Base classes; all that are left if not given.")] = None,
    novel: Annotated[int, typer.Option(help="Novel classes, at each step.")] = 40,
    overlap: Annotated[int, typer.Option(help="How many of the novel classes are base classes too.")] = 5,
    steps: Annotated[int, typer.Option(help="Number of steps, for the scenario 'steps'.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the draw.")] = 0,
    classes: options.ClassFacts = None,
    features: Annotated[
        Path | None, typer.Option(help="For clustered scenarios: a .npy file with a row per training sample.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="For clustered scenarios: a saved model of all classes, whose features are used."),
    ] = None,
    classes_from: options.ClassesFrom = None,
    out: Annotated[Path | None, typer.Option(help="Write the scenario to this JSON file.")] = None,
    device: options.Device = None,
) -> None:
    """Draw one of the paper's scenarios, and write it to a file."""
    from branchout.data import scenarios
    from branchout.data.draw_scenario import draw_scenario, read_features

    if out:
        check_output(out, such_as="scenario.json")
    if name not in scenarios.NAMES:
        raise unknown("scenario", name, scenarios.NAMES)
    dataset = open_dataset(data, classes, classes_from)
    rows = read_features(features) if features else None
    if model and name in scenarios.CLUSTERED:
        with progress() as on_progress:
            rows = open_model(str(model), device=device).features(dataset.train, on_progress=on_progress)
    plan = draw_scenario(name, dataset, base=base, novel=novel, overlap=overlap, steps=steps, seed=seed, features=rows)
    splits = [(split, f"{count:,}", f"{images:,}") for split, count, images in scenarios.describe(plan, dataset)]
    console.print(new_table("split", "classes", "images", rows=splits, title=Text(str(plan))))
    if out:
        plan.save(out)
        say(f"Scenario written to {out}")
