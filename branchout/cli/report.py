"""Telling: a page about a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from branchout.cli.app import Saved, app, console, open_model, quoted, say, then, warn


@app.command(epilog="Example: branchout report v2/ test_photos/")
def report(
    model: Saved,
    test: Annotated[
        Path | None, typer.Argument(metavar="[TEST]", help="Labelled images: one folder per class.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; else MODEL-report.html beside MODEL.")] = None,
    results: Annotated[Path | None, typer.Option(help="A folder of rows measured with other methods.")] = None,
    gallery: Annotated[int, typer.Option(min=0, max=1000, help="How many pictures a gallery shows at most.")] = 60,
) -> None:
    """Write one HTML page: what was added, gained, lost.

    It needs no network. Without TEST it shows what the model itself holds.
    """
    from branchout import api
    from branchout.cli.display import progress
    from branchout.model.checkpoint import is_saved_model
    from branchout.report.markup import size
    from branchout.report.page import beside, check_report

    loaded = open_model(model)
    if out is None:
        # A model that is not a folder of the user's own, built in or from a hub, is told about right here.
        out = beside(Path(model)) if is_saved_model(Path(model)) else Path(f"{Path(model).name}-report.html")
    check_report(out)
    problems: list[str] = []
    samples = None if test is None else api.samples_in(test, problems)
    warn(problems)
    with progress(console) as watch:
        typed = model.rstrip("/") or model
        loaded.report(samples, out=out, results=results, gallery=gallery, typed=typed, report=watch)
    say(f"{out} ({size(out.stat().st_size)}): open it in a browser")
    if test is None:
        then(f"branchout report {quoted(model)} TEST/")
