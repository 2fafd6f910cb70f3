"""Making models: pretrain, check, extend, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from branchout.cli.app import (
    OFTEN,
    Arch,
    Base,
    Data,
    Goal,
    Memory,
    New,
    Recipe,
    Seed,
    TensorBoard,
    Val,
    Where,
    app,
    clear,
    console,
    must_be_free,
    open_dataset,
    open_model,
    quoted,
    say,
    then,
    warn,
)
from branchout.errors import BranchoutError, unknown


@app.command(rich_help_panel=OFTEN)
def pretrain(
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the base model is saved.")],
    arch: Annotated[str, typer.Option(help="resnet10, resnet18, resnet50, resnet32 or vit_tiny.")] = "resnet10",
    size: Annotated[int | None, typer.Option(min=8, help="Input size in pixels; 32 for glyphs, else 64.")] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Channels of the first stage (vit_tiny: of every token); less is a slimmer net."),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="fast (40 epochs; vit_tiny: 60, AdamW) or paper (90, steps; ResNets only).")
    ] = "fast",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, if not the schedule's.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="Train on the base classes of this scenario file.")] = None,
    half: Annotated[bool, typer.Option("--half", help="Save in half precision.")] = False,
    tensorboard: TensorBoard = None,
    seed: Seed = 0,
) -> None:
    """Train a base model from scratch."""
    from dataclasses import replace

    from branchout import api
    from branchout.cli import event_files
    from branchout.cli.display import progress
    from branchout.data.scenarios import Scenario
    from branchout.model import architectures
    from branchout.training.loop import Event
    from branchout.training.pretrain import schedule_for

    must_be_free(out)
    event_files.check(tensorboard)
    architectures.check(arch, size, width)
    optimisation = schedule_for(arch, schedule)
    if epochs is not None:
        optimisation = replace(optimisation, epochs=epochs)
    dataset = open_dataset(data)
    train, val = dataset.train, dataset.val
    if scenario:
        plan = Scenario.load(scenario)
        placed = plan.train(dataset)
        train, val = placed.select(placed.origin == 0), plan.test(dataset, step=0)
    work = api.claim(out, {"command": "pretrain", "arch": arch, "width": width, "size": size, "seed": seed,
                           "optimisation": repr(optimisation), "images": train.fingerprint()})  # fmt: skip
    with progress(console) as shown, event_files.event_files(tensorboard) as kept:
        report = event_files.both(shown, kept)
        model = api.pretrain(
            train,
            arch=arch,
            width=width,
            size=size or (32 if dataset.kind == "glyph" else 64),
            kind=dataset.kind,
            optimisation=optimisation,
            seed=seed,
            checkpoint=work / "pretrain.safetensors",
            report=report,
        )
        val = val.of_classes(model.classes)
        accuracy = model.evaluate(val, report=report).after.all
        kept(Event("validation", 1, 1, {"accuracy": accuracy}))
    model.note(accuracy=round(accuracy, 4)).save(out, half=half)
    clear(work)
    say(
        f"{len(model.classes):,} classes, {100 * accuracy:.1f}% right on {len(val):,} validation images; saved in {out}"
    )
    then(f"branchout extend NEW/ --base {quoted(out)} --memory OLD/ --out v2/")


@app.command(rich_help_panel=OFTEN)
def check(
    new: New,
    base: Base,
    memory: Memory = None,
    val: Val = None,
    branch: Where = "last",
    arch: Arch = None,
) -> None:
    """Say what `extend` would do: counts, problems, overlaps, time, space."""
    from branchout.method.forecast import forecast
    from branchout.model.staged import branch_point

    model = open_model(base, arch, base=True)
    branch_point(model.classifier.backbone, branch)
    problems: list[str] = []
    material = model.material(new, memory, val, problems=problems)
    warn(problems)
    for line in forecast(model, material, branch):
        say(line)
    out = "v3" if Path(base).name == "v2" else "v2"
    options = {"base": base, "memory": memory, "val": val, "branch": branch, "arch": arch, "out": out}
    given = [f"--{name} {quoted(value)}" for name, value in options.items() if value not in (None, "last")]
    then(f"branchout extend {quoted(new)} {' '.join(given)}")


@app.command(rich_help_panel=OFTEN)
def extend(
    new: New,
    base: Base,
    out: Annotated[Path, typer.Option(help="Where the new model is saved.")],
    memory: Memory = None,
    val: Val = None,
    branch: Where = "last",
    goal: Goal = "balanced",
    recipe: Recipe = "branchout",
    fuse: Annotated[bool, typer.Option("--fuse", help="Learn deltas even if no class is shared.")] = False,
    pooler: Annotated[
        str | None, typer.Option(help="max (the default) or average, for classes that several branches know.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of stage I, if not the recipe's.")] = None,
    arch: Arch = None,
    tensorboard: TensorBoard = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one JSON object a line, the last is the result.")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Add the classes of NEW to a model.

    Stopped at any moment, the same command goes on.
    """
    from contextlib import nullcontext

    from branchout import api
    from branchout.cli import event_files
    from branchout.cli.display import progress
    from branchout.cli.machine import emit, emit_progress, errors_as_events, extension
    from branchout.method.frontier import Frontier
    from branchout.method.recipes import recipe_named
    from branchout.model.heads import POOLERS
    from branchout.model.staged import branch_point

    with errors_as_events(as_json):
        recipe_named(recipe)  # a typo is answered first, before anything is loaded or looked at
        Frontier.check_goal(goal)
        if pooler not in (None, *POOLERS):
            raise unknown("pooler", pooler, POOLERS)
        must_be_free(out)
        event_files.check(tensorboard)
        model = open_model(base, arch, base=True)
        branch_point(model.classifier.backbone, branch)
        pools = model.classifier.fused.pooler.kind
        if model.classifier.steps and pooler not in (None, pools):
            raise BranchoutError(f"{base} pools with {pools!r}, which its first step has set; leave --pooler out")
        problems: list[str] = []
        folders = (new, memory, val)
        images = [None if each is None else api.samples_in(each, problems, model.classes) for each in folders]
        if as_json:
            for line in problems:
                emit("warning", message=line)
        else:
            warn(problems)
        assert images[0] is not None
        lost = model.steps_without_memory(images[1])
        if lost:
            message = (
                f"of {lost:,} classes that earlier steps taught no image was given. They may be forgotten: only the "
                "base is remembered without images. Put some of each into --memory"
            )
            emit("warning", message=message) if as_json else say(message, "warning:")
        shown = nullcontext(emit_progress) if as_json else progress(console)
        with shown as report, event_files.event_files(tensorboard) as kept:
            grown = model.extend(
                images[0],
                memory=images[1],
                val=images[2],
                out=out,
                pooler=pooler or pools,
                report=event_files.both(report, kept),
                branch=branch,
                goal=goal,
                recipe=recipe,
                fuse=fuse,
                epochs=epochs,
                seed=seed,
            )
            for event in event_files.goals(grown.saved.history[-1]["measured"]):
                kept(event)
        if as_json:
            emit("result", **extension(grown, out))
        else:
            _tell(grown, out)


@app.command(rich_help_panel=OFTEN)
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo writes; made anew each time.")] = Path("demo"),
) -> None:
    """Everything on built-in data: 800 characters and 40 more."""
    from branchout import demo as play

    grown = play.run(out, console)
    _tell(grown, out / "v2")


def _tell(model: Any, out: Path) -> None:
    """The end of an extension: the table of operating points, and what to type next."""
    from branchout.cli.display import operating_points, percent, size

    event = model.saved.history[-1]
    counts = model.classifier.parameter_counts()
    step = f"step {len(model.classifier.steps)}"
    measured = event["measured"]
    if event["chosen on"] == "pseudo":
        novel = measured["after"]["novel"] if measured else None
        say(
            f"{'no image of the old classes was' if not event['exemplars kept'] else 'images of few old classes were'} "
            "given. The operating point was placed with stand-ins made from the base's "
            "own weights. "
            + (f"On held-out new images: novel {percent(novel)}%. " if novel is not None else "")
            + f"To measure, put old images in folders by class and type: branchout evaluate {quoted(out)} FOLDER/",
            "base accuracy could not be measured:",
        )
    elif measured:
        if event["chosen on"] == "held-out":
            say(
                "a fifth of the images was held out to choose and report with. Old images that were kept probably "
                "trained the base, so its accuracy looks better here than on images it never saw; --val avoids both"
            )
        console.print(operating_points(measured, event["goal"]))
    if model.frontier.single_point_reason():
        say(model.frontier.single_point_reason())
    say(
        f"{len(model.classes):,} classes; base {size(counts['base'])} parameters, this branch {size(counts[step])}, "
        f"all branches {size(sum(v for k, v in counts.items() if k not in ('heads', 'deltas')))} without heads; "
        f"saved in {out}"
    )
    here = quoted(out)
    then(
        f"branchout predict {here} photo.jpg",
        f"branchout tune {here} --goal avg",
        f"branchout evaluate {here} TEST/",
        f"branchout report {here} TEST/",
        f"branchout serve {here} TEST/",
    )
