"""The command that makes a model of many steps smaller: compact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branchout.cli import options
from branchout.cli.app import app, console, open_model, quoted, say, then, warn
from branchout.cli.display import new_table, progress

if TYPE_CHECKING:
    from rich.table import Table

    from branchout.api.compaction import CompactionOutcome


@app.command(epilog="Example: branchout compact v11/ --memory old_photos/ --out small/")
def compact(
    model: options.Saved,
    memory: Annotated[
        list[Path],
        typer.Option(
            metavar="PATH",
            help="Kept images of all classes, old and added: one folder per class. May be given several times.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to save the smaller model in.")],
    branches: Annotated[int, typer.Option(min=1, help="How many branches remain.")] = 1,
    val: options.Val = None,
    images: Annotated[Path | None, typer.Option(help="More images to learn from; they need no labels.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Training epochs. Default: computed from the number of images.")
    ] = None,
    classes_from: options.ClassesFrom = None,
    seed: options.Seed = 0,
    device: options.Device = None,
) -> None:
    """Distil the branches of all steps into one, or a few.

    Classes and goals stay as they are. If it is interrupted, the same command resumes it.
    """
    from branchout.training.work_folder import check_out

    check_out(out, (memory, val, images))
    loaded = open_model(model, device=device)
    told: list[str] = []

    def warn_now(problem: str) -> None:
        told.append(problem)
        warn([problem])

    with progress() as on_progress:
        small = loaded.compact(
            memory,
            out=out,
            branches=branches,
            val=val,
            images=images,
            epochs=epochs,
            classes_from=classes_from,
            seed=seed,
            on_progress=on_progress,
            announce=say,
            warn=warn_now,
        )
    assert small.compaction is not None
    warn(problem for problem in small.compaction.warnings if problem not in told)
    console.print(comparison(small.compaction))
    if val is None:
        say("The model was probably trained on images of --memory, so its accuracy before may be too high: use --val.")
    say(f"{len(small.classes):,} classes, as before; saved in {out}")
    tuning = [f"branchout tune {quoted(out)} --goal avg"] if len(small.frontier) > 1 else []
    then(*tuning, f"branchout evaluate {quoted(out)} TEST/")


def comparison(found: CompactionOutcome) -> Table:
    """Size, speed and accuracy before → after."""
    from branchout.model.card import compaction_rows

    table = new_table("", "before", "after", rows=compaction_rows(found.saved.history[-1]), title="compaction")
    table.add_row("images a second", *(f"{side.images_per_second:,.0f}" for side in (found.before, found.after)))
    if found.images:
        table.caption = (
            f"accuracies on {found.images:,} images that this run did not train with; avg: of base classes and "
            "of the steps of the smaller model"
        )
    return table
