"""The command line. One function per command; what they do lives elsewhere and is imported when a command runs."""

from branchout.cli import (  # noqa: F401 – each adds its commands to the app
    bases,
    bench,
    compact,
    data,
    explain,
    export,
    inbox,
    inference,
    report,
    serve,
    training,
)
from branchout.cli.app import app, main

__all__ = ["app", "main"]
