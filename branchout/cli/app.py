"""What all commands share: the app, its options, how it speaks and how it stops."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from branchout.api import Model
    from branchout.data.dataset import Dataset

GOES_ON = ("pretrain", "extend")
"""Commands that, stopped at any moment, take up their work when they are typed again."""


class Stopped(Exception):  # noqa: N818 – not an error
    """Ctrl-C. Typer would end the program at once if it saw the interrupt itself."""


class NobodyReads(Exception):  # noqa: N818 – not an error
    """The reader of our output has gone, as `| head` does; typer would call it a failure."""


class Commands(TyperGroup):
    """The commands in the order in which one needs them."""

    first = (
        "demo",
        "pretrain",
        "check",
        "extend",
        "tune",
        "predict",
        "evaluate",
        "report",
        "explain",
        "serve",
        "export",
    )

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
        say(str(error), "error:", "bold red", error=True)
        sys.exit(1)
    except (Stopped, KeyboardInterrupt):
        say("stopped; the same command again goes on from here" if goes_on else "stopped", error=True)
        sys.exit(130)
    except (NobodyReads, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if goes_on:
            say("stopped, since nobody reads the output; the same command again goes on from here", error=True)
        sys.exit(1 if goes_on else 0)


def say(text: str, label: str = "", style: str = "yellow", *, error: bool = False) -> None:
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


def open_dataset(data: str, facts: Path | None = None) -> Dataset:
    """Open a dataset and say what was wrong with its files."""
    from branchout.data.dataset import with_facts
    from branchout.data.datasets import resolve

    problems: list[str] = []
    dataset = resolve(data, report=lambda found: problems.extend(found.summary()))
    warn(problems)
    return dataset if facts is None else with_facts(dataset, facts)


Base = Annotated[
    str,
    typer.Option("--base", help="A saved model, efficientnet_lite0, 'glyphs', a timm name, a checkpoint, hf-hub:…"),
]
New = Annotated[
    Path, typer.Argument(metavar="NEW", help="New images: one folder per class. A class the base knows is extended.")
]
Memory = Annotated[Path | None, typer.Option(help="Old images that were kept: one folder per old class.")]
Val = Annotated[Path | None, typer.Option(help="Labelled images to choose and report with; else some are held out.")]
Saved = Annotated[str, typer.Argument(metavar="MODEL", help="A saved model: a folder, or hf-hub:owner/name.")]
Goal = Annotated[
    str, typer.Option(help="all, avg, balanced, novel, or a condition: 'novel>=0.80', which is 'novel>=80%'.")
]
Recipe = Annotated[str, typer.Option(help="branchout (ours), paper (the text) or reference (the authors' runs).")]
Where = Annotated[str, typer.Option("--branch", help="What is cloned: last, a stage, a module, or fc for nothing.")]
Arch = Annotated[str | None, typer.Option(help="The timm network of a checkpoint file.")]
Flip = Annotated[bool, typer.Option("--flip", help="Average over the mirror image: twice the time.")]
TensorBoard = Annotated[Path | None, typer.Option(metavar="DIR", help="Also write TensorBoard event files here.")]
Seed = Annotated[int, typer.Option(min=0, help="Another number draws and trains differently.")]


def open_model(name: str, arch: str | None = None, *, base: bool = False) -> Model:
    """Open a model; a name that is none is answered with the saved models nearby, and for a base with timm's."""
    from branchout import api

    place = Path(name)
    try:
        return api.load(name, arch=arch)
    except BranchoutError as error:
        if place.exists() or name == "glyphs" or name.startswith("hf-hub:"):
            raise
        nearby = sorted(str(file.parent) for file in place.parent.glob("*/branchout.json"))
        there = f"; there is: {', '.join(nearby[:6])}" if nearby else ", which is a folder that holds branchout.json"
        also = f". As for timm: {error}" if base and "/" not in name else ""
        raise BranchoutError(f"there is no saved model {place}{there}{also}") from None


# What several commands say.


def then(*commands: str) -> None:
    """Commands to type next, each on a line of its own that can be copied."""
    console.print(Text("\n  ".join(["next:", *commands])), highlight=False, soft_wrap=True)


def quoted(value: object) -> str:
    return shlex.quote(str(value))


def warn(problems: list[str]) -> None:
    if problems:
        say("\n  ".join(["", *problems]), "left out or worth a look:")


def must_be_free(out: Path) -> None:
    if out.exists():
        raise BranchoutError(f"{out} is there already; choose another --out, or remove it first")


def clear(work: Path) -> None:
    import shutil

    shutil.rmtree(work, ignore_errors=True)
