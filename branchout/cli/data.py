"""Looking at data and drawing scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from branchout.cli.app import ClassFacts, Data, Device, app, console, open_dataset, open_model, say
from branchout.errors import BranchoutError, unknown


@app.command(epilog="Example: branchout data photos/ --sheet sheet.png")
def data(
    data: Data,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet to this picture file.")] = None,
    classes: Annotated[int, typer.Option(min=1, help="How many classes the sheet shows.")] = 60,
) -> None:
    """Show what is in a dataset: classes, counts, sizes, problems."""
    import numpy as np

    from branchout.data.contact_sheet import contact_sheet

    dataset = open_dataset(data)
    from rich.table import Table

    table = Table(title=Text(dataset.name), title_justify="left")
    for heading in ("", "classes", "images", "fewest", "median", "most", "pixels"):
        table.add_column(heading, justify="right" if heading else "left")
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
        say(f"{shown} of {len(dataset.train.classes):,} classes are on {sheet}")


def _sizes(samples: Any) -> str:
    """The common size of all pictures, or the smallest, median and largest."""
    import numpy as np

    if samples.pixels.shape is not None:
        height, width, _ = samples.pixels.shape
        return f"{width}×{height}"
    sizes = getattr(samples.pixels, "sizes", None)
    if sizes is None:
        return "not measured"
    ordered = sizes[samples.rows][np.argsort(sizes[samples.rows].prod(1))]
    return " … ".join(f"{w}×{h}" for h, w in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))


@app.command(epilog="Example: branchout scenario disjoint photos/ --novel 10 --out disjoint.json")
def scenario(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="disjoint, steps, overlap-style, …; an unknown name lists them all.")
    ],
    data: Data,
    base: Annotated[int | None, typer.Option(help="Base classes; all that are left if not given.")] = None,
    novel: Annotated[int, typer.Option(help="Novel classes, at each step.")] = 40,
    overlap: Annotated[int, typer.Option(help="How many of the novel classes are base classes too.")] = 5,
    steps: Annotated[int, typer.Option(help="Number of steps, for the scenario 'steps'.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Draws classes and halves.")] = 0,
    classes: ClassFacts = None,
    features: Annotated[
        Path | None, typer.Option(help="For clustered scenarios: a .npy file with a row per training sample.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="For clustered scenarios: a saved model of all classes, whose features serve.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scenario to this JSON file.")] = None,
    device: Device = None,
) -> None:
    """Draw one of the paper's scenarios, and write it to a file."""
    from branchout.data import scenarios
    from branchout.data.draw_scenario import draw_scenario

    if name not in scenarios.NAMES:
        raise unknown("scenario", name, scenarios.NAMES)
    dataset = open_dataset(data, classes)
    rows = _array(features) if features else None
    if model and name in scenarios.CLUSTERED:
        from branchout.cli.display import progress

        with progress(console) as report:
            rows = open_model(str(model), device=device).features(dataset.train, report=report)
    plan = draw_scenario(
        name,
        dataset,
        base=base,
        novel=novel,
        overlap=overlap,
        steps=steps,
        seed=seed,
        features=rows,
    )
    from rich.table import Table

    table = Table(title=Text(str(plan)), title_justify="left")
    for heading in ("split", "classes", "images"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split, count, images in scenarios.describe(plan, dataset):
        table.add_row(split, f"{count:,}", f"{images:,}")
    console.print(table)
    if out:
        plan.save(out)
        say(f"written to {out}")


def _array(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BranchoutError(f"{path} is not a readable .npy file of features: {error}") from None
