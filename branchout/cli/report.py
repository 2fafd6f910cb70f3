"""The command `branchout report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from branchout.cli import options
from branchout.cli.app import app, check_order, open_model, quoted, say, then, warn
from branchout.cli.display import progress
from branchout.units import size


@app.command(epilog="Example: branchout report v2/ test_photos/")
def report(
    model: options.Saved,
    test: Annotated[Path | None, options.Labelled] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default MODEL-report.html.")] = None,
    results: Annotated[Path | None, typer.Option(help="A folder of results of other methods, as JSON files.")] = None,
    gallery: Annotated[int, typer.Option(min=0, max=1000, help="How many images a gallery shows at most.")] = 60,
    classes_from: options.ClassesFrom = None,
    device: options.Device = None,
) -> None:
    """Write an HTML report: what was added, gained and forgotten.

    The report is one file that makes no network requests. Without TEST it shows what the model itself records.
    """
    check_order(model, [test])
    from branchout import api
    from branchout.model.manifest import is_saved_model
    from branchout.report.page import check_report, default_path

    loaded = open_model(model, device=device)
    if out is None:
        # The report of a built-in or downloaded model is written to the current folder.
        out = default_path(Path(model)) if is_saved_model(Path(model)) else Path(f"{Path(model).name}-report.html")
    check_report(out)
    problems: list[str] = []
    samples = None if test is None else api.samples_in(test, problems, loaded.classes, classes_from)
    warn(problems)
    with progress() as watch:
        model_path = model.rstrip("/") or model
        loaded.report(samples, out=out, results=results, gallery=gallery, model_path=model_path, on_progress=watch)
    say(f"Wrote {out} ({size(out.stat().st_size)}). Open it in a browser.")
    if test is None:
        then(f"branchout report {quoted(model)} TEST/")
