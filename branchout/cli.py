"""The commands. One function each; what they do lives elsewhere and is imported when a command runs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from branchout.api import Model
    from branchout.data.dataset import Dataset

GOES_ON = ("pretrain", "extend")
"""Commands that, stopped at any moment, take up their work when they are typed again."""
BATCH_PICTURES, BATCH_PIXELS = 64, 64_000_000
"""How much `predict` decodes before the network is asked."""


class Stopped(Exception):  # noqa: N818 – not an error
    """Ctrl-C. Typer would end the program at once if it saw the interrupt itself."""


class NobodyReads(Exception):  # noqa: N818 – not an error
    """The reader of our output has gone, as `| head` does; typer would call it a failure."""


class Commands(TyperGroup):
    """The commands in the order in which one needs them."""

    first = ("demo", "pretrain", "check", "extend", "tune", "predict", "evaluate")

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: [*self.first, name].index(name))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped from None
        except BrokenPipeError:
            raise NobodyReads from None


class Output(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise NobodyReads from None


app = typer.Typer(
    cls=Commands,
    help="Add classes to a trained image classifier without making it forget the old ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Output()


def main() -> None:
    """What the `branchout` command runs: errors that a user can mend are printed without a traceback."""
    goes_on = sys.argv[1:2] in [[name] for name in GOES_ON]
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it is known what to do if nobody reads it
    except BranchoutError as error:
        _say(str(error), "error:", "bold red", error=True)
        sys.exit(1)
    except (Stopped, KeyboardInterrupt):
        _say("stopped; the same command again goes on from here" if goes_on else "stopped", error=True)
        sys.exit(130)
    except (NobodyReads, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if goes_on:
            _say("stopped, since nobody reads the output; the same command again goes on from here", error=True)
        sys.exit(1 if goes_on else 0)


def _say(text: str, label: str = "", style: str = "yellow", *, error: bool = False) -> None:
    """Print text as it is, square brackets and all; in a file a sentence stays on one line."""
    to = Output(stderr=True) if error else console
    to.print(
        Text.assemble((f"{label} ", style), text) if label else Text(text),
        highlight=False,
        soft_wrap=not to.is_terminal,
    )


OFTEN, MORE = "Commands", "Data and experiments"

Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="A folder with one folder per class, a benchmark's folder, or 'glyphs'."),
]
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


@app.command(rich_help_panel=MORE)
def data(
    data: Data,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet to this picture file.")] = None,
    classes: Annotated[int, typer.Option(min=1, help="How many classes the sheet shows.")] = 60,
) -> None:
    """Show what is in a dataset: classes, counts, sizes, problems."""
    import numpy as np

    from branchout.data.sheet import contact_sheet

    dataset = _dataset(data)
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
        _say(f"{attribute}: {listed}{', …' if len(values) > 8 else ''}")
    if sheet:
        shown = contact_sheet(dataset.train, sheet, classes=classes)
        _say(f"{shown} of {len(dataset.train.classes):,} classes are on {sheet}")


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


@app.command(rich_help_panel=MORE)
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
) -> None:
    """Draw one of the paper's scenarios, and write it to a file."""
    from branchout.data import scenarios

    if name not in scenarios.NAMES:
        raise BranchoutError(f"no scenario is called {name!r}; known are: {', '.join(scenarios.NAMES)}")
    dataset = _dataset(data, classes)
    rows = _array(features) if features else None
    if model and name in scenarios.CLUSTERED:
        from branchout.show import progress

        with progress(console) as report:
            rows = _model(str(model)).features(dataset.train, report=report)
    plan = scenarios.build(
        name,
        dataset,
        base=base,
        novel=novel,
        overlap=overlap,
        steps=steps,
        seed=seed,
        features=rows,
    )
    table = Table(title=Text(str(plan)), title_justify="left")
    for heading in ("split", "classes", "images"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split, count, images in scenarios.describe(plan, dataset):
        table.add_row(split, f"{count:,}", f"{images:,}")
    console.print(table)
    if out:
        plan.save(out)
        _say(f"written to {out}")


def _array(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BranchoutError(f"{path} is not a readable .npy file of features: {error}") from None


Base = Annotated[
    str,
    typer.Option("--base", help="A saved model, efficientnet_lite0, 'glyphs', a timm name, or a checkpoint file."),
]
New = Annotated[
    Path, typer.Argument(metavar="NEW", help="New images: one folder per class. A class the base knows is extended.")
]
Memory = Annotated[Path | None, typer.Option(help="Old images that were kept: one folder per old class.")]
Val = Annotated[Path | None, typer.Option(help="Labelled images to choose and report with; else some are held out.")]
Saved = Annotated[str, typer.Argument(metavar="MODEL", help="A saved model: a folder.")]
Goal = Annotated[str, typer.Option(help="all, avg, balanced, novel, or a condition such as 'novel>=0.80'.")]
Recipe = Annotated[str, typer.Option(help="branchout (ours), paper (the text) or reference (the authors' runs).")]
Where = Annotated[str, typer.Option("--branch", help="What is cloned: last, a stage, a module, or fc for nothing.")]
Arch = Annotated[str | None, typer.Option(help="The timm network of a checkpoint file.")]
Flip = Annotated[bool, typer.Option("--flip", help="Average over the mirror image: twice the time.")]
Seed = Annotated[int, typer.Option(min=0, help="Another number draws and trains differently.")]


def _model(name: str, arch: str | None = None, *, base: bool = False) -> Model:
    """Open a model; a name that is none is answered with the saved models nearby, and for a base with timm's."""
    from branchout import api

    place = Path(name)
    try:
        return api.load(name, arch=arch)
    except BranchoutError as error:
        if place.exists() or name == "glyphs":
            raise
        nearby = sorted(str(file.parent) for file in place.parent.glob("*/branchout.json"))
        there = f"; there is: {', '.join(nearby[:6])}" if nearby else ", which is a folder that holds branchout.json"
        also = f". As for timm: {error}" if base and "/" not in name else ""
        raise BranchoutError(f"there is no saved model {place}{there}{also}") from None


@app.command(rich_help_panel=OFTEN)
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
    seed: Seed = 0,
) -> None:
    """Train a base model from scratch."""
    from dataclasses import replace

    from branchout import api
    from branchout.data.scenarios import Scenario
    from branchout.model.resnet import ARCHITECTURES
    from branchout.show import progress
    from branchout.train.pretrain import SCHEDULES

    _must_be_free(out)
    if schedule not in SCHEDULES:
        raise BranchoutError(f"no schedule is called {schedule!r}; known are: {', '.join(SCHEDULES)}")
    if arch not in ARCHITECTURES:
        raise BranchoutError(f"no architecture is called {arch!r}; known are: {', '.join(ARCHITECTURES)}")
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
        val = val.of_classes(model.classes)
        accuracy = model.evaluate(val, report=report).after.all
    model.note(accuracy=round(accuracy, 4)).save(out, half=half)
    _clear(work)
    _say(
        f"{len(model.classes):,} classes, {100 * accuracy:.1f}% right on {len(val):,} validation images; saved in {out}"
    )
    _next(f"branchout extend NEW/ --base {_quoted(out)} --memory OLD/ --out v2/")


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
    from branchout.model.surgery import branch_point
    from branchout.plan import forecast

    model = _model(base, arch, base=True)
    branch_point(model.classifier.backbone, branch)
    problems: list[str] = []
    material = model.material(new, memory, val, problems=problems)
    _warn(problems)
    for line in forecast(model, material, branch):
        _say(line)
    options = {"base": base, "memory": memory, "val": val, "branch": branch, "arch": arch, "out": "v2"}
    given = [f"--{name} {_quoted(value)}" for name, value in options.items() if value not in (None, "last")]
    _next(f"branchout extend {_quoted(new)} {' '.join(given)}")


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
    per_step: Annotated[
        bool, typer.Option("--per-step", help="A number of its own for each step, then the dial.")
    ] = False,
    fuse: Annotated[bool, typer.Option("--fuse", help="Learn deltas even if no class is shared.")] = False,
    pooler: Annotated[
        str | None, typer.Option(help="max (the default) or average, for classes that several branches know.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of stage I, if not the recipe's.")] = None,
    arch: Arch = None,
    seed: Seed = 0,
) -> None:
    """Add the classes of NEW to a model.

    Stopped at any moment, the same command goes on.
    """
    from branchout import api
    from branchout.model.fusion import POOLERS
    from branchout.model.surgery import branch_point
    from branchout.show import progress
    from branchout.train.frontier import Frontier
    from branchout.train.recipes import recipe_named

    _must_be_free(out)
    recipe_named(recipe)  # a typo is answered before anything is loaded
    Frontier.check_goal(goal)
    if pooler not in (None, *POOLERS):
        raise BranchoutError(f"no pooler is called {pooler!r}; known are: {', '.join(POOLERS)}")
    model = _model(base, arch, base=True)
    branch_point(model.classifier.backbone, branch)
    pools = model.classifier.fused.pooler.kind
    if model.classifier.steps and pooler not in (None, pools):
        raise BranchoutError(f"{base} pools with {pools!r}, which its first step has set; leave --pooler out")
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
            pooler=pooler or pools,
            report=report,
            branch=branch,
            goal=goal,
            recipe=recipe,
            fuse=fuse,
            per_step=per_step,
            epochs=epochs,
            seed=seed,
        )
    _tell(grown, out)


@app.command(rich_help_panel=OFTEN)
def tune(model: Saved, goal: Goal = "balanced") -> None:
    """Turn the dial to another operating point, at once.

    Nothing is trained and no images are needed.
    """
    from branchout.show import percent
    from branchout.train.frontier import Frontier

    Frontier.check_goal(goal)
    loaded = _model(model)
    figures = loaded.tune(goal)
    frontier = loaded.frontier
    told = ", ".join(f"{name} {percent(value)}%" for name, value in figures.items() if value is not None)
    whence = {
        "dev": "given for it",
        "held-out": "held out for it",
        "pseudo": "new ones, and stand-ins for old ones",
    }
    _say(f"{goal}: {told}, on the {frontier.images:,} images that chose it ({whence[frontier.measured]})")
    _next(f"branchout evaluate {_quoted(model)} TEST/", f"branchout predict {_quoted(model)} photo.jpg")


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
    from branchout.data.folders import pictures_in

    files = [file for given in pictures for file in pictures_in(given)]
    loaded = _model(model)
    waiting: list[tuple[Path, Any]] = []
    pixels = answered = 0
    for number, file in enumerate(files, 1):
        try:
            waiting.append((file, decode(file)))
            pixels += waiting[-1][1].size
        except UnreadableImage as error:
            if len(files) == 1:
                raise
            _say(str(error), "left out:", error=True)
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

    from branchout.data.decode import printable

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
) -> None:
    """Measure a model before → after its last step; what was forgotten."""
    from dataclasses import asdict

    from branchout import api
    from branchout.show import before_after, percent, progress

    loaded = _model(model)
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
            table.add_row(Text(row["class"]), str(row["images"]), percent(row["before"]), percent(row["after"]))
        console.print(table)
    if two_fold and not loaded.classifier.steps:
        _say("--two-fold is about operating points, and a base model has none")
    elif two_fold:
        for goal in ("all", "balanced", "avg"):
            scored = loaded.two_fold(found, goal)
            _say(f"two-fold {goal}: {percent(scored.two_fold)} ± {percent(scored.spread)}")
    if flip:
        _say("averaged over mirror images: every picture was run twice")


@app.command(rich_help_panel=OFTEN)
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo writes; made anew each time.")] = Path("demo"),
) -> None:
    """Everything on built-in data: 800 characters and 40 more."""
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
        novel = measured["after"]["novel"] if measured else None
        _say(
            "no image of the old classes was given. The operating point was placed with stand-ins made from the base's "
            "own weights. "
            + (f"On held-out new images: novel {percent(novel)}%. " if novel is not None else "")
            + f"To measure, put old images in folders by class and type: branchout evaluate {_quoted(out)} FOLDER/",
            "base accuracy could not be measured:",
        )
    elif measured:
        if event["chosen on"] == "held-out":
            _say(
                "a fifth of the images was held out to choose and report with. Old images that were kept probably "
                "trained the base, so its accuracy looks better here than on images it never saw; --val avoids both"
            )
        console.print(operating_points(measured, event["goal"]))
    _say(
        f"{len(model.classes):,} classes; base {size(counts['base'])} parameters, this branch {size(counts[step])}, "
        f"all branches {size(sum(v for k, v in counts.items() if k not in ('heads', 'deltas')))} without heads; "
        f"saved in {out}"
    )
    here = _quoted(out)
    _next(
        f"branchout predict {here} photo.jpg", f"branchout tune {here} --goal avg", f"branchout evaluate {here} TEST/"
    )


def _next(*commands: str) -> None:
    """Commands to type next, each on a line of its own that can be copied."""
    console.print(Text("\n  ".join(["next:", *commands])), highlight=False, soft_wrap=True)


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


def _warn(problems: list[str]) -> None:
    if problems:
        _say("\n  ".join(["", *problems]), "left out or worth a look:")


def _must_be_free(out: Path) -> None:
    if out.exists():
        raise BranchoutError(f"{out} is there already; choose another --out, or remove it first")


def _clear(work: Path) -> None:
    import shutil

    shutil.rmtree(work, ignore_errors=True)


@app.command(rich_help_panel=MORE)
def version() -> None:
    """Print the version."""
    from branchout import __version__

    _say(__version__)
