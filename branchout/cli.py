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
    _warn(problems)
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


Base = Annotated[
    str, typer.Option("--base", help="A saved model, a timm name, efficientnet_lite0, 'glyphs', or a checkpoint file.")
]
Memory = Annotated[Path | None, typer.Option(help="Old images that were kept: one folder per old class.")]
Val = Annotated[Path | None, typer.Option(help="Labelled images to choose and report with; else some are held out.")]
Saved = Annotated[Path, typer.Argument(help="A saved model.")]
Goal = Annotated[str, typer.Option(help="all, avg, balanced, novel, or a condition such as 'novel>=0.80'.")]
Recipe = Annotated[str, typer.Option(help="branchout (ours), paper (the text) or reference (the authors' runs).")]
Where = Annotated[str, typer.Option("--branch", help="What is cloned: last, a stage, a module, or fc for nothing.")]
Arch = Annotated[str | None, typer.Option(help="The timm network of a checkpoint file.")]
Flip = Annotated[bool, typer.Option("--flip", help="Average over the mirror image: twice the time.")]


@app.command()
def pretrain(
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the base model is saved.")],
    arch: Annotated[str, typer.Option(help="resnet10, resnet18, resnet50 or resnet32.")] = "resnet10",
    size: Annotated[int | None, typer.Option(min=8, help="Input size in pixels; 32 for glyphs, else 64.")] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Channels of the first stage; less is a slimmer net.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="fast (40 epochs, cosine) or paper (90 epochs, steps).")] = "fast",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, if not the schedule's.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="Train on the base classes of this scenario file.")] = None,
    half: Annotated[bool, typer.Option("--half", help="Save in half precision.")] = False,
    seed: int = 0,
) -> None:
    """Train a base model from scratch."""
    from dataclasses import replace

    from branchout import api
    from branchout.data.scenarios import Scenario
    from branchout.show import progress
    from branchout.train.pretrain import SCHEDULES

    _must_be_free(out)
    if schedule not in SCHEDULES:
        raise BranchoutError(f"no schedule is called {schedule!r}; known are: {', '.join(SCHEDULES)}")
    optimisation = SCHEDULES[schedule] if epochs is None else replace(SCHEDULES[schedule], epochs=epochs)
    dataset = _dataset(data)
    train, val = dataset.train, dataset.val
    if scenario:
        plan = Scenario.load(scenario)
        placed = plan.train(dataset)
        train, val = placed.select(placed.origin == 0), plan.test(dataset, step=0)
    work = api.claim(out, {"command": "pretrain", "arch": arch, "width": width, "size": size, "seed": seed,
                           "optimisation": repr(optimisation), "images": train.fingerprint()})  # fmt: skip
    with progress(console) as report:
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
        accuracy = model.evaluate(val.of_classes(model.classes), report=report).after.all
    model.save(out, half=half)
    _clear(work)
    console.print(f"{len(model.classes):,} classes, {100 * accuracy:.1f}% right on {len(val):,} validation images")
    _next(f"branchout extend NEW/ --base {out} --memory OLD/ --out v2/")


@app.command()
def check(
    new: Annotated[Path, typer.Argument(help="New images: one folder per class.")],
    base: Base,
    memory: Memory = None,
    val: Val = None,
    branch: Where = "last",
    arch: Arch = None,
) -> None:
    """Say what `extend` would do: counts, problems, overlaps, time and space."""
    from branchout import api
    from branchout.plan import forecast

    model = api.load(base, arch=arch)
    problems: list[str] = []
    material = model.material(new, memory, val, problems=problems)
    _warn(problems)
    for line in forecast(model, material, branch):
        console.print(line, highlight=False)
    _next(_extend_command(new, base, memory, val))


@app.command()
def extend(
    new: Annotated[Path, typer.Argument(help="New images: one folder per class. A class the base knows is extended.")],
    base: Base,
    out: Annotated[Path, typer.Option(help="Where the new model is saved.")],
    memory: Memory = None,
    val: Val = None,
    branch: Where = "last",
    goal: Goal = "balanced",
    recipe: Recipe = "branchout",
    fuse: Annotated[bool, typer.Option("--fuse", help="Learn deltas even if no class is shared.")] = False,
    pooler: Annotated[str, typer.Option(help="max or average, for classes that several branches know.")] = "max",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of stage I, if not the recipe's.")] = None,
    arch: Arch = None,
    seed: int = 0,
) -> None:
    """Add the classes of NEW to a model. Stopped at any moment, the same command goes on."""
    from branchout import api
    from branchout.model.fusion import POOLERS
    from branchout.show import progress
    from branchout.train.frontier import Frontier
    from branchout.train.recipes import recipe_named

    _must_be_free(out)
    recipe_named(recipe)  # a typo is answered before anything is loaded
    Frontier.check_goal(goal)
    if pooler not in POOLERS:
        raise BranchoutError(f"no pooler is called {pooler!r}; known are: {', '.join(POOLERS)}")
    model = api.load(base, arch=arch)
    problems: list[str] = []
    images = [None if folder is None else api.samples_in(folder, problems) for folder in (new, memory, val)]
    _warn(problems)
    assert images[0] is not None
    with progress(console) as report:
        grown = model.extend(
            images[0],
            memory=images[1],
            val=images[2],
            out=out,
            pooler=pooler,
            report=report,
            branch=branch,
            goal=goal,
            recipe=recipe,
            fuse=fuse,
            epochs=epochs,
            seed=seed,
        )
    _tell(grown, out)


@app.command()
def tune(model: Saved, goal: Goal = "balanced") -> None:
    """Move a model to another operating point, at once: nothing is trained and no images are needed."""
    from branchout import api
    from branchout.show import percent

    loaded = api.load(model)
    figures = loaded.tune(goal)
    frontier = loaded.frontier
    told = ", ".join(f"{name} {percent(value)}%" for name, value in figures.items() if value is not None)
    console.print(
        f"{goal}: {told} on the {frontier.images:,} images that chose it ({frontier.measured})", highlight=False
    )
    _next(f"branchout evaluate {model} TEST/", f"branchout predict {model} photo.jpg")


@app.command()
def predict(
    model: Saved,
    pictures: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, help="How many answers for each picture.")] = 3,
    flip: Flip = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Name what is in pictures."""
    import json

    from branchout import api
    from branchout.data.folders import pictures_in

    files = [file for given in pictures for file in pictures_in(given)]
    loaded = api.load(model)
    for file in files:
        try:
            answers = loaded.predict(file, top=top, flip=flip)
        except BranchoutError as error:
            if len(files) == 1:
                raise
            Console(stderr=True).print(f"[yellow]left out:[/] {_plain(str(error))}", highlight=False)
            continue
        if as_json:
            listed = [{"class": name, "probability": round(p, 6)} for name, p in answers]
            print(json.dumps({"file": str(file), "answers": listed}, ensure_ascii=False))
        else:
            told = ", ".join(f"{name} {100 * p:.1f}%" for name, p in answers)
            console.print(f"{_plain(str(file))}: {_plain(told)}", highlight=False, soft_wrap=True)


@app.command()
def evaluate(
    model: Saved,
    test: Annotated[Path, typer.Argument(help="Labelled images: one folder per class.")],
    flip: Flip = False,
    two_fold: Annotated[
        bool, typer.Option("--two-fold", help="Also choose on one half, score on the other, swap.")
    ] = False,
) -> None:
    """Measure a model before → after its last step, per split and per class."""
    from dataclasses import asdict

    from branchout import api
    from branchout.show import before_after, percent, progress

    loaded = api.load(model)
    problems: list[str] = []
    samples = api.samples_in(test, problems)
    _warn(problems)
    with progress(console) as report:
        found = loaded.evaluate(samples, flip=flip, report=report)
    before = found.before
    console.print(before_after(None if before is None else asdict(before), asdict(found.after), len(found.labels)))
    losses = [row for row in found.classes() if row["before"] is not None and row["after"] < row["before"]][:10]
    if losses:
        table = Table(title="what was forgotten, worst first", title_justify="left")
        for heading in ("class", "images", "before", "after"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for row in losses:
            table.add_row(_plain(row["class"]), str(row["images"]), percent(row["before"]), percent(row["after"]))
        console.print(table)
    if two_fold:
        for goal in ("all", "balanced", "avg"):
            scored = loaded.two_fold(found, goal)
            console.print(f"two-fold {goal}: {percent(scored.two_fold)} ± {percent(scored.spread)}", highlight=False)
    if flip:
        console.print("averaged over mirror images: every picture was run twice", highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo writes; made anew each time.")] = Path("demo"),
) -> None:
    """Everything on built-in data: 800 characters are extended by 40, 5 of them in a new typeface."""
    from branchout import demo as play

    grown = play.run(out, console)
    _tell(grown, out / "v2")


# What several commands say.


def _tell(model: Any, out: Path) -> None:
    """The end of an extension: the table of operating points, and what to type next."""
    from branchout.show import operating_points, percent, size

    event = model.artefact.history[-1]
    counts = model.classifier.parameter_counts()
    step = f"step {len(model.classifier.steps)}"
    measured = event["measured"]
    if event["chosen on"] == "pseudo":
        told = (
            [f"novel {percent(measured['after']['novel'])}%"]
            if measured and measured["after"]["novel"] is not None
            else []
        )
        console.print(
            "[yellow]base accuracy could not be measured:[/] no image of the old classes was given. The operating "
            "point was placed with pseudo-exemplars, made from the base's own weights. "
            + (f"On held-out new images: {', '.join(told)}. " if told else "")
            + f"To measure, put old images in folders by class and type: branchout evaluate {out} FOLDER/",
            highlight=False,
        )
    elif measured:
        if event["chosen on"] == "held-out":
            console.print(
                "no --val was given: a fifth of the images was held out to choose and report with", highlight=False
            )
        console.print(operating_points(measured, event["goal"]))
    console.print(
        f"{len(model.classes):,} classes; base {size(counts['base'])} parameters, this branch {size(counts[step])}, "
        f"all branches {size(sum(v for k, v in counts.items() if k not in ('heads', 'deltas')))} without heads; "
        f"saved in {out}",
        highlight=False,
    )
    _next(f"branchout predict {out} photo.jpg", f"branchout tune {out} --goal avg", f"branchout evaluate {out} TEST/")


def _next(*commands: str) -> None:
    console.print("next:", *(f"\n  {_plain(command)}" for command in commands), highlight=False, soft_wrap=True)


def _warn(problems: list[str]) -> None:
    if problems:
        console.print("[yellow]left out or worth a look:[/]")
        for line in problems:
            console.print(f"  {_plain(line)}", highlight=False)


def _extend_command(new: Path, base: str, memory: Path | None, val: Path | None) -> str:
    kept = f" --memory {memory}" if memory else ""
    chosen = f" --val {val}" if val else ""
    return f"branchout extend {new} --base {base}{kept}{chosen} --out v2"


def _must_be_free(out: Path) -> None:
    if out.exists():
        raise BranchoutError(f"{out} is there already; choose another --out, or remove it first")


def _clear(work: Path) -> None:
    import shutil

    shutil.rmtree(work, ignore_errors=True)


@app.command()
def version() -> None:
    """Print the version."""
    from branchout import __version__

    console.print(__version__, highlight=False)
