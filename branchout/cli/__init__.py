"""The commands. One function each; what they do lives elsewhere and is imported when a command runs."""

from branchout.cli import bench, data, export, make, report, serve, use  # noqa: F401 – each adds its commands to the app
from branchout.cli.app import app, main

__all__ = ["app", "main"]
