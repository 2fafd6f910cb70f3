"""Using models: tune, predict, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from branchout.cli.app import MORE, OFTEN, Flip, Goal, Saved, app, console, open_model, quoted, say, then, warn
from branchout.errors import BranchoutError

BATCH_PICTURES, BATCH_PIXELS = 64, 64_000_000
"""How much `predict` decodes before the network is asked."""


@app.command(rich_help_panel=OFTEN)
def tune(model: Saved, goal: Goal = "balanced") -> None:
    """Turn the dial to another operating point, at once.

    Nothing is trained and no images are needed.
    """
    from branchout.cli.display import percent
    from branchout.method.frontier import read_as
    from branchout.model import hub

    understood = read_as(goal)  # a typo is answered before anything is loaded
    if hub.is_hub_name(model):
        raise BranchoutError(
            f"{model} is on the hub, where the choice cannot be kept; save a copy of it first: "
            f"branchout pull {quoted(model.removeprefix(hub.PREFIX))} --out v2/"
        )
    loaded = open_model(model)
    figures = loaded.tune(goal)
    frontier = loaded.frontier
    told = ", ".join(f"{name} {percent(value)}%" for name, value in figures.items() if value is not None)
    whence = {
        "dev": "given for it",
        "held-out": "held out for it",
        "pseudo": "new ones, and stand-ins for old ones",
    }
    say(f"{understood}: {told}, on the {frontier.images:,} images that chose it ({whence[frontier.measured]})")
    if frontier.single_point_reason():
        say(frontier.single_point_reason())
    then(f"branchout evaluate {quoted(model)} TEST/", f"branchout predict {quoted(model)} photo.jpg")


@app.command(rich_help_panel=OFTEN)
def predict(
    model: Saved,
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES", help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, help="How many answers for each picture.")] = 3,
    flip: Flip = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Name what is in pictures."""
    from branchout.data.decode import UnreadableImage, decode
    from branchout.data.folders import images_in

    files = [file for given in pictures for file in images_in(given)]
    loaded = open_model(model)
    waiting: list[tuple[Path, Any]] = []
    pixels = answered = 0
    for number, file in enumerate(files, 1):
        try:
            waiting.append((file, decode(file)))
            pixels += waiting[-1][1].size
        except UnreadableImage as error:
            if len(files) == 1:
                raise
            say(str(error), "left out:", error=True)
        if waiting and (len(waiting) == BATCH_PICTURES or pixels >= BATCH_PIXELS or number == len(files)):
            answers = loaded.predict([image for _, image in waiting], top=top, flip=flip)
            for (name, _), answer in zip(waiting, answers, strict=True):
                _answer(name, answer, as_json)
            answered += len(waiting)
            waiting, pixels = [], 0
    if not answered:
        raise BranchoutError(f"none of these {len(files):,} pictures could be read")


def _answer(file: Path, answer: list[tuple[str, float]], as_json: bool) -> None:
    import json

    from branchout.errors import printable

    if as_json:
        listed = [{"class": name, "probability": round(p, 6)} for name, p in answer]
        print(json.dumps({"file": printable(file), "answers": listed}, ensure_ascii=False))
    else:
        told = ", ".join(f"{name} {100 * p:.1f}%" for name, p in answer)
        console.print(Text(f"{printable(file)}: {told}"), highlight=False, soft_wrap=True)


@app.command(rich_help_panel=OFTEN)
def evaluate(
    model: Saved,
    test: Annotated[Path, typer.Argument(metavar="TEST", help="Labelled images: one folder per class.")],
    flip: Flip = False,
    two_fold: Annotated[
        bool, typer.Option("--two-fold", help="Also choose on one half, score on the other, swap.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write a table to this file: one row per class.")] = None,
    images_csv: Annotated[Path | None, typer.Option(help="Write a table to this file: one row per image.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
) -> None:
    """Measure a model before → after its last step; what was forgotten."""
    from dataclasses import asdict

    from branchout import api
    from branchout.cli.display import before_after, percent, progress
    from branchout.errors import printable
    from branchout.files import check_output, write_csv, write_json

    asked = [file for file in (csv, images_csv, json) if file is not None]
    for file in asked:
        check_output(file)
    if len({file.absolute() for file in asked}) < len(asked):
        raise BranchoutError("two tables cannot go to one file; name another for --csv, --images-csv or --json")
    loaded = open_model(model)
    problems: list[str] = []
    samples = api.samples_in(test, problems, loaded.classes)
    warn(problems)
    with progress(console) as report:
        found = loaded.evaluate(samples, flip=flip, report=report)
    before = found.before
    console.print(before_after(None if before is None else asdict(before), asdict(found.after), len(found.labels)))
    point = _operating_point(loaded)
    if point:
        place = ", ".join(f"{name} {value:.4g}" for name, value in point.items() if name != "goal")
        say(f"at the operating point {point['goal']} ({place}); branchout tune moves it")
    if before is not None:
        say(f"before: the model as it was before step {len(loaded.classifier.steps)}, on the classes it knew")
    losses = [row for row in found.classes() if row["before"] is not None and row["after"] < row["before"]][:10]
    if losses:
        table = Table(title="what was forgotten, worst first", title_justify="left")
        for heading in ("class", "images", "before", "after"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for row in losses:
            table.add_row(Text(row["class"]), str(row["images"]), percent(row["before"]), percent(row["after"]))
        console.print(table)
    folds = {}
    if two_fold and not loaded.classifier.steps:
        say("--two-fold is about operating points, and a base model has none")
    elif two_fold:
        for goal in ("all", "balanced", "avg"):
            scored = folds[goal] = loaded.two_fold(found, goal)
            say(f"two-fold {goal}: {percent(scored.two_fold)} ± {percent(scored.spread)}")
    if flip:
        say("averaged over mirror images: every picture was run twice")
    files = [printable(name) for name in samples.ids]
    if csv:
        write_csv(csv, found.classes())
    if images_csv:
        write_csv(images_csv, found.images(files))
    if json:
        about = {"model": model, "test": printable(test), "flip": flip, "operating_point": point}
        scores = {goal: {"mean": scored.two_fold, "spread": scored.spread} for goal, scored in folds.items()}
        write_json(json, {**about, **found.to_dict(files), "two_fold": scores or None})
    if asked:
        say(f"written: {', '.join(map(str, asked))}")


def _operating_point(model: Any) -> dict[str, Any] | None:
    """Where the dial stands, and the goal that put it there; None for a base model."""
    if not model.saved.fusions:
        return None
    fusion = model.saved.fusions[-1]
    names = ("b",) if model.frontier.kind == "dial" else ("alpha", "beta")
    return {"goal": fusion.goal, **dict(zip(names, model.frontier.settings[fusion.point].tolist(), strict=True))}


@app.command(rich_help_panel=MORE)
def version() -> None:
    """Print the version."""
    from branchout import __version__

    say(__version__)
