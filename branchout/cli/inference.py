"""Commands that use models: tune, classes, predict, evaluate, version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from branchout.cli import options
from branchout.cli.app import app, check_folders, check_order, console, open_model, quoted, readable, say, then, warn
from branchout.cli.display import before_after, forgotten, progress
from branchout.cli.json_events import print_json
from branchout.errors import BranchoutError, no_saved_model, printable
from branchout.files import check_output, write_csv, write_json
from branchout.goals import CHOSEN_ON, METRICS, PAPER_GOALS, read_as
from branchout.model.catalogue import is_listed
from branchout.units import count, percent, setting

if TYPE_CHECKING:
    import numpy as np

    from branchout.api import Model
    from branchout.data.verify import ImageFile
    from branchout.evaluate.compare import Comparison
    from branchout.evaluate.two_fold import Scored

    Decoded = tuple[ImageFile, np.ndarray]

HUB = "hf-hub:"
Extended = Annotated[
    str, typer.Argument(metavar="MODEL", help="A saved model with added classes: a folder that extend saved.")
]
BATCH_IMAGES, BATCH_PIXELS = 64, 64_000_000
"""How much `predict` decodes before the network runs."""


@app.command(epilog="Example: branchout tune v2/ --goal 'novel>=0.80'")
def tune(model: Extended, goal: options.GoalOrNone = None) -> None:
    """Choose another operating point, without training. Without --goal: show the points, and change nothing."""
    understood = None if goal is None else read_as(goal)  # a typo is answered before anything is imported or read
    if model.startswith(HUB):
        raise BranchoutError(
            f"{model} is on the hub, and tune takes a folder on this machine. Save a copy first: "
            f"branchout pull {quoted(model.removeprefix(HUB))} --out v2/"
        )
    if not Path(model).exists():  # answered before anything slow is imported
        if model == "glyphs" or is_listed(model):
            raise BranchoutError(
                f"{model} is a network without added classes, so it has no operating points to choose from. tune takes "
                f"a folder that extend saved: branchout extend NEW/ --base {model} --out v2/"
            )
        raise no_saved_model(Path(model))
    from branchout.method.running import tune as tuning

    if goal is None:
        frontier, point, saved = tuning.saved_point(Path(model))
        goals = frontier.possible_goals() if len(frontier) > 1 else []  # every goal chooses a single point
        chosen = {f"saved ({saved})": point, **{each: frontier.choose(each) for each in goals}}
    else:
        frontier, point = tuning.tune(Path(model), goal)
        chosen = {str(understood): point}
    for words, number in chosen.items():
        known = {name: value for name, value in frontier.at(number).items() if value is not None}
        if frontier.chosen_on == "pseudo":  # their accuracies are not those of images
            new = f"novel {percent(known['novel'])}%, " if "novel" in known else ""
            say(f"{words}: {new}accuracy on old classes not measured; chosen with new images and pseudo-exemplars")
        else:
            accuracies = ", ".join(f"{name} {percent(value)}%" for name, value in known.items())
            say(f"{words}: {accuracies}, on {frontier.images:,} {CHOSEN_ON[frontier.chosen_on]}")
    if frontier.chosen_on == "held-out":
        say("these images also chose the point, so accuracy on other images may be lower")
    if frontier.single_point_reason():
        say(frontier.single_point_reason())
    if goal is None and len(frontier) > 1:
        then(f"branchout tune {quoted(model)} --goal avg")
    else:
        then(f"branchout evaluate {quoted(model)} TEST/", f"branchout predict {quoted(model)} photo.jpg")


@app.command(epilog="Example: branchout classes v2/")
def classes(model: options.Opened, as_json: options.AsJson = False) -> None:
    """List the class names of a model, in the order of the logits."""
    from branchout.labels import branch_name

    space = open_model(model).classifier.space
    for name in space.classes:
        if as_json:
            known_to = [branch_name(number) for number, names in enumerate(space.branches) if name in names]
            print_json({"class": name, "branches": known_to})
        else:
            console.print(Text(name), highlight=False, soft_wrap=True)


@app.command(epilog="Example: branchout predict v2/ photo.jpg folder/ --json")
def predict(
    model: options.Saved,
    images: options.Pictures,
    top: Annotated[int, typer.Option(min=1, help="How many classes to print for each image.")] = 3,
    flip: options.Flip = False,
    as_json: options.AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Write a table to this file: .csv, .jsonl or .parquet.")] = None,
    dask: Annotated[
        str | None,
        typer.Option("--dask", metavar="ADDRESS", help="With --out: predict on the cluster of this Dask scheduler."),
    ] = None,
    device: options.Device = None,
) -> None:
    """Predict the classes of images."""
    from branchout.data.folders import images_in

    if dask is not None and out is None:
        raise BranchoutError("--dask writes a table. Name it: --out answers.parquet")
    check_order(model, images)
    files = [file for given in images for file in images_in(given)]
    if out is not None:
        from branchout.api.bulk_prediction import Settings, predict_files

        with progress() as on_progress:
            unread = predict_files(Settings(model, top, flip, device), files, out, dask=dask, on_progress=on_progress)
        could_not = f", {unread:,} of them could not be read" if unread else ""
        say(f"written: {out} ({count(len(files), 'image')}{could_not})")
        return
    loaded = open_model(model, device=device)
    for batch in _batches(readable(files)):
        predictions = loaded.predict([pixels for _, pixels in batch], top=top, flip=flip)
        for (file, _), prediction in zip(batch, predictions, strict=True):
            if as_json:
                listed = [{"class": name, "probability": round(p, 6)} for name, p in prediction]
                print_json({"file": printable(file), "answers": listed})
            else:
                shown = ", ".join(f"{name} {100 * p:.1f}%" for name, p in prediction)
                console.print(Text(f"{printable(file)}: {shown}"), highlight=False, soft_wrap=True)


def _batches(images: Iterator[Decoded]) -> Iterator[list[Decoded]]:
    batch: list[Decoded] = []
    pixels = 0
    for image in images:
        batch.append(image)
        pixels += image[1].size
        if len(batch) == BATCH_IMAGES or pixels >= BATCH_PIXELS:
            yield batch
            batch, pixels = [], 0
    if batch:
        yield batch


@app.command(epilog="Example: branchout evaluate v2/ test_photos/ --csv classes.csv")
def evaluate(
    model: options.Saved,
    test: Annotated[Path, options.Labelled],
    flip: options.Flip = False,
    two_fold: Annotated[
        bool, typer.Option("--two-fold", help="Also choose points on one half of the images and measure on the other.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write a table to this file: one row per class.")] = None,
    images_csv: Annotated[Path | None, typer.Option(help="Write a table to this file: one row per image.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    classes_from: options.ClassesFrom = None,
    device: options.Device = None,
) -> None:
    """Measure the accuracy before and after the last step."""
    check_order(model, [test])
    check_folders(test, classes_from=classes_from)
    given = {"classes.csv": csv, "images.csv": images_csv, "results.json": json}
    asked = [file for file in given.values() if file is not None]
    for such_as, file in given.items():
        if file is not None:
            check_output(file, such_as=such_as)
    if len({file.absolute() for file in asked}) < len(asked):
        raise BranchoutError("Two tables cannot go to one file. Choose different --csv, --images-csv and --json")
    from branchout import api
    from branchout.evaluate.compare import as_row

    loaded = open_model(model, device=device)
    problems: list[str] = []
    with progress() as on_progress:
        samples = api.samples_in(test, problems, loaded.classes, classes_from, on_progress)
    warn(problems)
    with progress() as on_progress:
        found = loaded.evaluate(samples, flip=flip, on_progress=on_progress)
    _show_comparison(loaded, found, test)
    folds = _two_fold(loaded, found) if two_fold else {}
    if flip:
        say("averaged over every image and its mirror image")
    files = [printable(name) for name in samples.ids]
    if csv:
        write_csv(csv, [as_row(row) for row in found.classes()])
    if images_csv:
        write_csv(images_csv, [as_row(row) for row in found.images(files)])
    if json:
        about = {"model": model, "test": printable(test), "flip": flip, "operating_point": _operating_point(loaded)}
        scores = {goal: {"mean": scored.two_fold, "spread": scored.spread} for goal, scored in folds.items()}
        write_json(json, {**about, **found.to_dict(files), "two_fold": scores or None})
    if asked:
        say(f"written: {', '.join(map(str, asked))}")


def _show_comparison(model: Model, found: Comparison, test: Path) -> None:
    console.print(before_after(found, f"{count(len(found.labels), 'image')} of {printable(test)}"))
    shown = [name for name in METRICS if getattr(found.after, name) is not None]
    say("classes: " + "; ".join(f"{name} = {METRICS[name].meaning.removeprefix('accuracy on ')}" for name in shown))
    point = _operating_point(model)
    if point is not None:
        place = setting([value for value in point.values() if isinstance(value, float)])
        own = any(model.saved.step_points[-1].offsets)
        added = f"the number added to all new logits{', together with a constant for each step' if own else ''}"
        dial = f", {added if 'b' in point else 'a point of the trained grid'}"
        say(f"operating point: goal {point['goal']}, {place}{dial}. To change it: branchout tune")
    if model.classifier.steps and found.after.base is None and found.after.overlap is None:
        say(f"{printable(test)} has no images of old classes, so what they lost is not measured")
    if found.before is not None:
        say(f"before: the model before step {len(model.classifier.steps)}, on the classes it knew")
    table = forgotten(found)
    if table.rows:
        console.print(table)


def _operating_point(model: Model) -> dict[str, str | float] | None:
    """The chosen goal and its b, or its α and β, as the JSON file keeps them; None for a base model."""
    if not model.saved.step_points:
        return None
    points, frontier = model.saved.step_points[-1], model.frontier
    names = ("b",) if frontier.kind == "dial" else ("alpha", "beta")
    return {"goal": points.goal, **dict(zip(names, frontier.settings[points.point].tolist(), strict=True))}


def _two_fold(model: Model, found: Comparison) -> dict[str, Scored]:
    if not model.classifier.steps:
        say("--two-fold chooses operating points, and a base model has none")
        return {}
    folds = {goal: model.two_fold(found, goal) for goal in PAPER_GOALS}
    for goal, scored in folds.items():
        say(f"two-fold {goal}: {percent(scored.two_fold)} ± {percent(scored.spread)}")
    return folds


@app.command(epilog="Example: branchout version")
def version() -> None:
    """Print the version."""
    from branchout import __version__

    say(__version__)
