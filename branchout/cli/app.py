"""What all commands share: the app, what it prints, and how errors end it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

from branchout.cli import deferred_compiler, many_processes
from branchout.cli.help import App
from branchout.errors import BranchoutError, explain_os_error, printable

if TYPE_CHECKING:
    import numpy as np

    from branchout.api import Model
    from branchout.data.datasets import Dataset
    from branchout.data.verify import ImageFile

RESUMABLE = ("pretrain", "extend", "compact", "inbox", "bench")
"""Commands that resume when they are run again after an interruption. `predict --out` does too."""
GROUPS = {
    "Create and extend models": ("demo", "bases", "pretrain", "check", "extend", "compact", "tune"),
    "Use models": ("classes", "predict", "evaluate", "explain", "report", "serve", "inbox"),
    "Export and share models": ("export", "push", "pull"),
    "Data and experiments": ("data", "scenario", "bench", "version"),
}
"""The commands in the order of the help."""


class Interrupted(Exception):  # noqa: N818 – not an error
    """Ctrl-C. Typer would end the program at once if it saw the interrupt itself."""


class OutputClosed(Exception):  # noqa: N818 – not an error
    """The output was closed, as by `| head`; typer would call it a failure."""


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in GROUPS.values() for name in names if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except BrokenPipeError:
            raise OutputClosed from None


class Output(Console):
    """A console that shows control characters in names and messages as escapes, and never sends them."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else printable(segment.text, newlines=True)
            yield segment if shown == segment.text else Segment(shown, segment.style)

    def on_broken_pipe(self) -> NoReturn:
        raise OutputClosed from None


app = App(
    cls=Commands,
    help="Add classes to a trained image classifier with little loss on the old ones.",
    epilog="Start with: branchout demo. Help on one command: branchout extend --help",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help takes half a second to import
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Output()


def _version(asked: bool) -> None:
    if asked:
        from branchout import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `branchout` command: errors that a user can fix end it with one sentence and status 1."""
    deferred_compiler.import_when_used()
    resumable = sys.argv[1:2] in [[name] for name in RESUMABLE] and not {"--help", "--list"} & set(sys.argv)
    resume = "; run the same command again to resume" if resumable else ""
    try:
        try:
            with many_processes.one_prints(" ".join(sys.argv[1:2])):
                app()
        finally:
            sys.stdout.flush()  # here, where a closed output is handled
    except (Interrupted, KeyboardInterrupt):
        if many_processes.rank() == 0:
            say(f"interrupted{resume}", error=True)
        sys.exit(130)
    except (OutputClosed, BrokenPipeError):
        _close_output()
        if resumable:
            say(f"stopped: the output was closed{resume}", error=True)
        sys.exit(1 if resumable else 0)
    except Exception as error:
        many_processes.let_first_speak(error)
        message = explained(error)
        if message is None:
            raise
        if isinstance(error, OSError):
            _close_output()  # it may be the output that cannot be written
        say(message, "error:", "bold red", error=True)
        sys.exit(1)


def explained(error: Exception) -> str | None:
    """The sentence for an error that a user can fix; None for a fault of the program."""
    if isinstance(error, BranchoutError):
        return str(error)
    if isinstance(error, OSError | MemoryError) or type(error).__name__ == "SafetensorError":
        return explain_os_error(error)
    if isinstance(error, RuntimeError):
        text = str(error)
        if "CUDA out of memory" in text or "MPS backend out of memory" in text:
            # `bench` has no --device: a row's hardware is the best of the machine.
            on_cpu = (
                "hide it: CUDA_VISIBLE_DEVICES= branchout bench …" if sys.argv[1:2] == ["bench"] else "use --device cpu"
            )
            return f"The GPU does not have enough memory. Close other programs that use it, or {on_cpu}"
        if "allocate memory" in text or "not enough memory" in text:
            return explain_os_error(MemoryError())
    return None


def _close_output() -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as in tests
        return


# Printing.


def say(text: str, label: str = "", style: str = "yellow", *, error: bool = False) -> None:
    """Print text as it is, with its square brackets; in a file a sentence stays on one line."""
    to = Output(stderr=True) if error else console
    to.print(
        Text.assemble((f"{label} ", style), text) if label else Text(text),
        highlight=False,
        soft_wrap=not to.is_terminal,
    )


def then(*commands: str) -> None:
    """Commands to run next, each on a line of its own that can be copied."""
    console.print(Text("\n  ".join(["next:", *commands])), highlight=False, soft_wrap=True)


def quoted(value: object) -> str:
    return shlex.quote(str(value))


def warn(problems: Iterable[str], *, error: bool = False) -> None:
    for line in problems:
        say(line, "warning:", error=error)


# Opening what was named.


def open_dataset(data: str, facts: Path | None = None, classes_from: str | None = None) -> Dataset:
    """Open a dataset and warn about files that were left out."""
    from branchout.data.datasets import resolve, with_facts

    problems: list[str] = []
    dataset = resolve(data, problems=problems, classes_from=classes_from)
    warn(problems)
    return dataset if facts is None else with_facts(dataset, facts)


def check_folders(*folders: Path | None, classes_from: str | None = None) -> None:
    """Refuse folders of images that cannot be used, before torch and the model are loaded."""
    from branchout.data.folders import scan

    for folder in (each for each in folders if each is not None):
        try:
            scan(folder, verify=False, classes_from=classes_from)
        except BranchoutError:
            scan(folder, classes_from=classes_from)  # decodes every file, and names all problems at once


def check_order(model: str, images: Iterable[Path | None]) -> None:
    """Refuse a folder of images where the model belongs, and the model among the images."""
    given = Path(model)
    swapped = next((each for each in images if each is not None and (each / "branchout.json").is_file()), None)
    if swapped is not None and given.exists() and not (given / "branchout.json").is_file():
        raise BranchoutError(
            f"{printable(given)} is not a saved model, but {printable(swapped)} is: their order is swapped. Type the "
            f"model first: {quoted(swapped)} {quoted(given)}"
        )


def open_model(
    name: str,
    arch: str | None = None,
    *,
    head: Path | None = None,
    classes: Path | None = None,
    device: str | None = None,
) -> Model:
    """Open a model, and say so: imports take seconds."""
    with Output(stderr=True).status(f"Opening {printable(name)} …"):
        from branchout import api

        return api.load(name, arch=arch, head=head, classes=classes, device=device)


def readable(files: list[ImageFile]) -> Iterator[tuple[ImageFile, np.ndarray]]:
    """The images that can be read, one by one; a file that cannot be read is an error only if it is the only one."""
    from branchout.data.decode import UnreadableImage, decode

    found = False
    for file in files:
        try:
            image = decode(file)
        except UnreadableImage as error:
            if len(files) == 1:
                raise
            say(str(error), "left out:", error=True)
        else:
            found = True
            yield file, image
    if not found:
        raise BranchoutError(f"None of these {len(files):,} images can be read")
