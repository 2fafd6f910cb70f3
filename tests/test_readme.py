"""The README shows only commands and options that exist."""

import re
from pathlib import Path

import typer

from branchout.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_and_option_shown_exists() -> None:
    shown = re.findall(r"^branchout +(\w+)([^#\n]*)|`branchout (\w+)([^`]*)`", README, re.MULTILINE)
    assert len(shown) >= 8
    for name, rest, inline_name, inline_rest in shown:
        command = COMMANDS[name or inline_name]
        known = {option for parameter in command.params for option in parameter.opts}
        for option in re.findall(r"--[a-z-]+", rest or inline_rest):
            assert option in known, f"branchout {name or inline_name} has no {option}"


def test_the_two_commands_stand_first() -> None:
    assert README.index("make demo") < README.index("branchout extend")
    assert "make test" in README
