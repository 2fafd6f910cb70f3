"""Commands that make models: pretrain, check, extend, demo."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branchout.cli import options
from branchout.cli import tensorboard as boards
from branchout.cli.app import app, check_folders, console, open_model, quoted, say, then, warn
from branchout.cli.display import operating_points, progress
from branchout.cli.json_events import emit, emit_extension, emit_progress, errors_as_events
from branchout.progress import Event, both
from branchout.units import count, parameters, percent

if TYPE_CHECKING:
    from branchout.api import Model, Prepared
    from branchout.method.results import Measured

AsEvents = Annotated[bool, typer.Option("--json", help="Print one JSON object per line; the last is the result.")]
Pooler = Annotated[
    str | None, typer.Option(help="max (the default) or average, for classes that several branches know.")
]


@app.command(epilog="Example: branchout pretrain photos/ --arch resnet18 --out base/")
def pretrain(
    data: options.Data,
    out: Annotated[Path, typer.Option(help="The folder to save the base model in.")],
    arch: Annotated[str, typer.Option(help="resnet10, resnet18, resnet50, resnet32 or vit_tiny.")] = "resnet10",
    size: Annotated[int | None, typer.Option(min=8, help="Input size in pixels: 32 for glyphs, else 64.")] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Channels of the first stage; for vit_tiny, of every token.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="fast (40 epochs; vit_tiny: 60 with AdamW) or paper (90 epochs; ResNets only).")
    ] = "fast",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, if not the schedule's.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="Train on the base classes of this scenario file.")] = None,
    half: Annotated[bool, typer.Option("--half", help="Save in half precision.")] = False,
    classes_from: options.ClassesFrom = None,
    tensorboard: options.TensorBoard = None,
    seed: options.Seed = 0,
    device: options.Device = None,
) -> None:
    """Train a base model from scratch.

    If it is interrupted, the same command resumes it.
    """
    from branchout import api

    boards.check(tensorboard)
    with progress() as shown, boards.event_files(tensorboard) as kept:
        model = api.pretrain(
            data,
            scenario=scenario,
            out=out,
            arch=arch,
            width=width,
            size=size,
            schedule=schedule,
            epochs=epochs,
            half=half,
            classes_from=classes_from,
            seed=seed,
            device=device,
            on_progress=both(shown, kept),
            warn=lambda line: warn([line]),
        )
        found = model.validation
        if found is not None:
            kept(Event("Validation", 1, 1, {"accuracy": found.after.all}))
    accuracy = (
        f"{100 * found.after.all:.1f}% accuracy on {count(len(found.labels), 'validation image')}"
        if found is not None
        else "no validation images, so its accuracy is not known"
    )
    say(f"{len(model.classes):,} classes, {accuracy}; saved in {out}")
    then(f"branchout extend NEW/ --base {quoted(out)} --memory OLD/ --out v2/")


@app.command(epilog="Example: branchout check new_photos/ --base base/ --memory old_photos/")
def check(
    new: options.New,
    base: options.Base,
    memory: options.Memories = None,
    val: options.Val = None,
    branch: options.Where = None,
    minutes: options.Minutes = None,
    arch: options.Arch = None,
    classes_from: options.ClassesFrom = None,
    head: options.HeadFile = None,
    classes: options.ClassNames = None,
    device: options.Device = None,
) -> None:
    """Preview `extend`: images, problems, overlaps, time, space."""
    from branchout.method.config import ExtendConfig

    config = ExtendConfig(branch=branch, minutes=minutes)
    check_folders(new, *(memory or ()), val, classes_from=classes_from)
    from branchout.method.running.forecast import forecast
    from branchout.method.running.plan import make_plan

    model = open_model(base, arch, head=head, classes=classes, device=device)
    with progress() as on_progress:
        prepared = model.prepare(
            new, memory=memory or None, val=val, config=config, classes_from=classes_from, on_progress=on_progress
        )
        plan = make_plan(model.classifier, prepared.split, config, model.device, timed=True, on_progress=on_progress)
    warn(prepared.warnings)
    for line in forecast(prepared, plan, device=model.device, base_bytes=model.bytes_on_disk()):
        say(line)
    for line in plan.lines():
        say(line)
    out = next(name for n in itertools.count(2) if not Path(name := f"v{n}").exists())
    given = [("base", base), ("arch", arch), ("head", head), ("classes", classes),
             *(("memory", folder) for folder in memory or ()), ("val", val), ("branch", branch), ("minutes", minutes),
             ("classes-from", classes_from), ("device", device), ("out", out)]  # fmt: skip
    typed = [f"--{name} {quoted(value)}" for name, value in given if value is not None]
    then(f"branchout extend {quoted(new)} {' '.join(typed)}")


@app.command(epilog="Example: branchout extend new_photos/ --base base/ --memory old_photos/ --out v2/")
def extend(
    new: options.New,
    base: options.Base,
    out: Annotated[Path, typer.Option(help="The folder to save the new model in.")],
    memory: options.Memories = None,
    val: options.Val = None,
    branch: options.Where = None,
    goal: options.Goal = "balanced",
    recipe: options.Recipe = "branchout",
    fuse: Annotated[bool, typer.Option("--fuse", help="Train deltas even if few classes overlap.")] = False,
    pooler: Pooler = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of stage I, if not the recipe's.")] = None,
    minutes: options.Minutes = None,
    memory_limit: options.MemoryLimit = None,
    arch: options.Arch = None,
    classes_from: options.ClassesFrom = None,
    head: options.HeadFile = None,
    classes: options.ClassNames = None,
    tensorboard: options.TensorBoard = None,
    as_json: AsEvents = False,
    seed: options.Seed = 0,
    device: options.Device = None,
) -> None:
    """Add the classes of NEW to a model.

    If it is interrupted, the same command resumes it.
    """
    from branchout.method.config import ExtendConfig

    with errors_as_events(as_json):
        config = ExtendConfig(
            recipe, branch, goal, fuse, epochs=epochs, seed=seed, pooler=pooler, minutes=minutes,
            memory_limit=memory_limit,
        )  # fmt: skip
        check_folders(new, *(memory or ()), val, classes_from=classes_from)
        from branchout.training.work_folder import check_out  # imports torch, which folder errors need not wait for

        check_out(out, (new, memory, val))
        boards.check(tensorboard)
        model = open_model(base, arch, head=head, classes=classes, device=device)
        with nullcontext(emit_progress) if as_json else progress() as on_progress:
            prepared = model.prepare(
                new, memory=memory or None, val=val, config=config, classes_from=classes_from, on_progress=on_progress
            )
        for line in prepared.warnings:
            emit("warning", message=line) if as_json else warn([line])
        shown = nullcontext(emit_progress) if as_json else progress()
        with shown as on_progress, boards.event_files(tensorboard) as kept:
            announce = (lambda line: emit("plan", message=line)) if as_json else say
            grown = model.extend_prepared(prepared, out=out, on_progress=both(on_progress, kept), announce=announce)
            boards.write_goals(grown, kept)
        if as_json:
            emit_extension(grown, out)
        else:
            _show_extension(grown, prepared, out)


@app.command(epilog="Example: branchout demo --out demo/")
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write in; a demo in it is replaced.")] = Path("demo"),
    device: options.Device = None,
) -> None:
    """Run everything on built-in data: 800 known characters, 35 new ones."""
    from branchout import demo as demonstration

    with progress() as on_progress:
        grown, prepared = demonstration.run(out, say, on_progress, device)
    inbox = f"--inbox {quoted(out / 'photos')} --memory {quoted(out / 'old')}"
    _show_extension(grown, prepared, out / "v2", f"{out / 'photos' / '1.png'}", f"{out / 'test'}", inbox)


def _about_held_out(prepared: Prepared) -> str:
    """Which images chose the operating point and measured it, where some had to be held out for it."""
    from branchout.method.split import without_new_images

    given = prepared.split.val_given
    if given:
        without = without_new_images(prepared.base.space, prepared.split.new)
        held = f"--val has no images of old classes{without}, so some of --memory were held out from training"
        instead = "Add labelled images of old classes to the folder of --val"
    else:
        held = "A fifth of the images was held out from training"
        instead = "If you have labelled images that the base was not trained on, give them with --val FOLDER/"
    return (
        f"{held}, to choose the operating point and to measure it. The base was probably trained on the images of "
        "--memory, so on images that it has not seen its accuracy may be lower. "
        f"{instead}: they then choose and measure, and all {'of --memory trains' if given else 'other images train'}."
    )


STEPS_SHOWN = 8
"""The last so many, where a model has more."""


def steps_line(measured: Measured) -> str:
    """The accuracy of each step alone: `novel` counts all of them together, and can hide that one failed."""
    from branchout.labels import branch_name

    named = [(branch_name(number), share) for number, share in enumerate(measured.after.steps, 1)]
    shown = [f"{name} {percent(share)}% of {measured.parts[name]:,}" for name, share in named if share is not None]
    missing = len(named) - len(shown)
    without = f"; {count(missing, 'step')} without images" if missing else ""
    return f"accuracy on the images of each step alone: {', '.join(shown[-STEPS_SHOWN:])}{without}"


def _show_extension(
    model: Model, prepared: Prepared, out: Path, photo: str = "photo.jpg", test: str = "TEST/", served_with: str = ""
) -> None:
    """The end of an extension: the table of operating points, and what to run next with which images."""
    from branchout.method.split import IMAGES_OF_OLD_CLASSES

    assert model.outcome is not None
    measured, chosen_on = model.outcome.measured, prepared.split.chosen_on
    if prepared.split.unmeasured:
        on_new = ""
        if measured and measured.after.novel is not None:
            images = count(measured.parts["novel"], "held-out image")
            on_new = f"Accuracy on {images} of new classes: {percent(measured.after.novel)}%. "
        say(
            f"{prepared.split.unmeasured}. The operating point was chosen without images of old classes. {on_new}"
            "To measure this model on old classes, collect labelled images of them and run: "
            f"branchout evaluate {quoted(out)} FOLDER/. {IMAGES_OF_OLD_CLASSES}.",
            "accuracy on old classes was not measured:",
        )
    elif measured:
        if chosen_on == "held-out":
            say(_about_held_out(prepared))
        console.print(operating_points(measured, prepared.config.goal))
        if len(measured.after.steps) > 1:
            say(steps_line(measured))
        say(
            f"branchout evaluate and branchout report measure on the images of {test}, so their accuracies will not be "
            "those of this table."
        )
    if model.frontier.single_point_reason():
        say(model.frontier.single_point_reason())
    counts = model.classifier.parameter_counts()
    branches = sum(count for name, count in counts.items() if name not in ("heads", "deltas"))
    branch = counts[f"step {len(model.classifier.steps)}"]
    say(
        f"saved in {out}: {len(model.classes):,} classes, {parameters(branches)} parameters without heads (base "
        f"{parameters(counts['base'])}, branch of this step {parameters(branch)})"
    )
    here = quoted(out)
    then(
        f"branchout predict {here} {quoted(photo)}",
        *([f"branchout tune {here} --goal avg"] if len(model.frontier) > 1 else []),
        f"branchout evaluate {here} {quoted(test)}",
        f"branchout report {here} {quoted(test)}",
        f"branchout serve {here} {quoted(test)} {served_with}".strip(),
    )
