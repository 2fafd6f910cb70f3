"""The commands. One function each; what they do lives elsewhere and is imported when a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from branchout.data.dataset import Dataset

app = typer.Typer(
    help="Add classes to a trained image classifier without making it forget the old ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


def main() -> None:
    """What the `branchout` command runs: errors that a user can mend are printed without a traceback."""
    try:
        app()
    except BranchoutError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the same command again goes on from here", highlight=False)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stderr.close()
        sys.exit(0)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


Data = Annotated[str, typer.Argument(help="A folder with one folder per class, a benchmark's folder, or 'glyphs'.")]
ClassFacts = Annotated[
    Path | None,
    typer.Option("--classes", help='JSON with "domains", "base_domain" and "siblings" of the classes.'),
]


def _dataset(data: str, facts: Path | None = None) -> Dataset:
    """Open a dataset and say what was wrong with its files."""
    from branchout.data.benchmarks import resolve
    from branchout.data.dataset import with_facts

    problems: list[str] = []
    dataset = resolve(data, report=lambda found: problems.extend(found.summary()))
    if problems:
        console.print("[yellow]left out or worth a look:[/]")
        for line in problems:
            console.print(f"  {_plain(line)}", highlight=False)
    return dataset if facts is None else with_facts(dataset, facts)


@app.command()
def data(
    data: Data,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet to this picture file.")] = None,
    classes: Annotated[int, typer.Option(min=1, help="How many classes the sheet shows.")] = 60,
) -> None:
    """Show what is in a dataset: classes, counts, sizes, problems."""
    import numpy as np

    from branchout.data.sheet import contact_sheet

    dataset = _dataset(data)
    table = Table(title=_plain(dataset.name), title_justify="left")
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
        console.print(f"{attribute}: {listed}{', …' if len(values) > 8 else ''}", highlight=False)
    if sheet:
        shown = contact_sheet(dataset.train, sheet, classes=classes)
        console.print(f"{shown} of {len(dataset.train.classes):,} classes are on {sheet}", highlight=False)


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


@app.command()
def scenario(
    name: Annotated[str, typer.Argument(help="disjoint, steps, overlap-style, …; an unknown name lists them all.")],
    data: Data,
    base: Annotated[int | None, typer.Option(help="Base classes; all that are left if not given.")] = None,
    novel: Annotated[int, typer.Option(help="Novel classes, at each step.")] = 40,
    overlap: Annotated[int, typer.Option(help="How many of the novel classes are base classes too.")] = 5,
    steps: Annotated[int, typer.Option(help="Number of steps, for the scenario 'steps'.")] = 1,
    seed: Annotated[int, typer.Option(help="Draws classes and halves.")] = 0,
    classes: ClassFacts = None,
    features: Annotated[
        Path | None, typer.Option(help="For clustered scenarios: a .npy file with a row per training sample.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scenario to this JSON file.")] = None,
) -> None:
    """Draw one of the paper's scenarios from a dataset, and write it to a file that others can use."""
    from branchout.data import scenarios

    if name not in scenarios.NAMES:
        raise BranchoutError(f"no scenario is called {name!r}; known are: {', '.join(scenarios.NAMES)}")
    dataset = _dataset(data, classes)
    plan = scenarios.build(
        name,
        dataset,
        base=base,
        novel=novel,
        overlap=overlap,
        steps=steps,
        seed=seed,
        features=_array(features) if features else None,
    )
    table = Table(title=_plain(str(plan)), title_justify="left")
    for heading in ("split", "classes", "images"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split, count, images in scenarios.describe(plan, dataset):
        table.add_row(split, f"{count:,}", f"{images:,}")
    console.print(table)
    if out:
        plan.save(out)
        console.print(f"written to {out}", highlight=False)


def _array(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BranchoutError(f"{path} is not a readable .npy file of features: {error}") from None


@app.command()
def version() -> None:
    """Print the version."""
    from branchout import __version__

    console.print(__version__, highlight=False)
