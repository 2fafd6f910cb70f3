"""The commands of the command line: their help in plain text, options in groups; options given twice are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

OPTION_GROUPS = {
    "Images": "--memory, --val, --images, --data, --new, --test, --scenario, --features, --classes-from, --threshold, "
    "--false-alarms",
    "Model": "--base, --model, --arch, --head, --classes, --width, --size, --half, --pooler, --branches",
    "Training": "--branch, --goal, --recipe, --fuse, --schedule, --faithful, --epochs, --branch-epochs, --minutes, "
    "--plan",
    "Scenario": "bench --scenario, --base-classes, --novel-classes, --overlap, --steps, --scale, --exemplars, "
    "--memory-total, --split, --seeds, --all-seeds, scenario --base, --novel, scenario --classes",
    "Decisions": "inbox --name, --new-class, --dismiss, --undo",
    "Teaching": "--teach, --resume, --accept, --discard, inbox --epochs",
    "Inbox": "--inbox, serve --memory",
    "Address": "--host, --port, --public, --token, --name",
    "Limits": "--max-mb, --batch",
    "Predictions": "--expect, --top, --nearest, --flip, --two-fold",
    "Output": "--out, bench --name, --json, --csv, --images-csv, --tensorboard, --results, --gallery",
    "Run": "--memory-limit, --list, --method, --stale, --watch, --workers, --dask, --seed, --device",
}
"""Options by their heading, all others under Run; after the name of a command, the option of this command only."""
GROUP_OF = {option: heading for heading, options in OPTION_GROUPS.items() for option in options.split(", ")}
FEW = 5
"""A command with at most this many options, --help included, lists them under one heading."""
VALUES = {"int": "N", "float": "X", "str": "TEXT", "path": "PATH"}
"""What stands for a value that has no name of its own."""


class App(typer.Typer):
    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        return super().command(*args, cls=Command, **settings)


PLAIN_WORDS = {
    "Input should be ": "",
    "a valid number": "a number",
    "a valid integer": "a whole number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Words for those of pydantic, with which newer versions of typer read values."""


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option with one value that is given twice (click would use the last); name wrong values plainly."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        options: list[Any] = [param for param in given if param.param_type_name == "option"]
        for option in options:
            times = options.count(option)
            if times > 1 and not (option.multiple or option.is_flag):
                ctx.fail(f"{max(option.opts, key=len)} takes one value and was given {times} times. Type it once.")
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _plain(error)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        shown = [(param, _name(param) + ("..." if param.nargs != 1 else "")) for param in arguments]
        return ["[OPTIONS]", *(name if param.required else f"[{name}]" for param, name in shown)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found = [(param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        arguments = [each for each in found if each[0].param_type_name == "argument"]
        options = [each for each in found if each not in arguments]
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [(_name(param), help_.removesuffix("[required]").rstrip()) for param, (_, help_) in arguments],
            **{heading: [] for heading in ("Options", *OPTION_GROUPS)},
        }
        for param, (option, help_) in options:
            heading = "Options" if len(options) <= FEW else group_of(str(self.name), max(param.opts, key=len))
            groups[heading].append((_short(option), help_))
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example on a line of its own, never wrapped: it can be copied."""
        heading, _, example = str(self.epilog).partition(": ")
        with formatter.section(heading):
            formatter.write(f"  {example}\n")


def group_of(command: str, option: str) -> str:
    return GROUP_OF.get(f"{command} {option}") or GROUP_OF.get(option, "Run")


def _plain(error: typer.BadParameter) -> str:
    """What was expected of a value and what was found; older versions of typer already say so."""
    errors = getattr(error.__cause__, "errors", None)
    if errors is None:
        return str(error.message)
    first = errors()[0]
    expected = str(first["msg"]).partition(",")[0]
    for theirs, ours in PLAIN_WORDS.items():
        expected = expected.replace(theirs, ours)
    return f"expected {expected}, found {first['input']!r}"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _short(option: str) -> str:
    """An option with a word for its value in place of the type."""
    return re.sub(r"<(\w+)( range)?>", lambda found: VALUES.get(found[1], found[1].upper()), option)
