"""Serving a model on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branchout.cli.app import OFTEN, app, open_model, quoted, say, then
from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from branchout.api import Model


@app.command(rich_help_panel=OFTEN)
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A saved model, or the --out of an extension that still runs.")
    ] = None,
    test: Annotated[
        Path | None, typer.Argument(metavar="[TEST]", help="Labelled images: one folder per class.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8000,
    watch: Annotated[Path | None, typer.Option(metavar="OUT", help="Show how far the extension into OUT is.")] = None,
    max_mb: Annotated[float, typer.Option(min=0.001, help="The largest picture file that is taken, in MB.")] = 20.0,
    batch: Annotated[int, typer.Option(min=1, help="How many pictures the network is given at once.")] = 32,
    name: Annotated[
        list[str] | None, typer.Option(help="Another name by which browsers may call this machine.")
    ] = None,
) -> None:
    """Serve a model: a local page, and an HTTP API.

    With TEST the page also shows what was gained and lost on these images. Ctrl-C ends it.
    """
    try:
        _serve(model, test, host, port, watch, max_mb, batch, name or [])
    except KeyboardInterrupt:
        sys.exit(0)  # the way to end it, even while it still loads


def _serve(
    model: str | None,
    test: Path | None,
    host: str,
    port: int,
    watch: Path | None,
    max_mb: float,
    batch: int,
    names: list[str],
) -> None:
    try:
        from branchout.serve.run import address, listen, serve
    except ModuleNotFoundError as error:
        raise BranchoutError(f"serving needs {error.name}; type: pip install 'branchout[serve]'") from None
    from branchout.serve.app import create_app
    from branchout.serve.guard import Names, is_loopback
    from branchout.serve.uploads import Limits

    place = model if model is not None else str(watch or "")
    if not place:
        raise BranchoutError("what is to be served? Type: branchout serve MODEL, or branchout serve --watch OUT")
    if test is not None and not test.is_dir():
        raise BranchoutError(f"there is no folder {test}; TEST holds labelled images, one folder per class")
    with listen(host, port, again=f"branchout serve {quoted(place)}") as sock:
        opened, watch = _open(model, watch)
        limits = Limits(file_bytes=int(max_mb * 1e6), batch=batch, waiting=max(256, 4 * batch))
        served = create_app(
            opened, names=Names(host, names), limits=limits, watch=watch, test=test, typed=place.rstrip("/") or place
        )
        here = address(sock, host)
        if opened is None:
            say(f"waiting for {watch} to be finished, at {here} (/docs: the API; Ctrl-C: the end)")
        else:
            say(f"{place}: {len(opened.classes):,} classes, at {here} (/docs: the API; Ctrl-C: the end)")
        if not is_loopback(host):
            say("whoever can reach this machine can use this server, and turn its dial", "not only for you:")
        then(f"curl -F files=@photo.jpg {here}/predict")
        sys.stdout.flush()
        serve(served, sock)


def _open(model: str | None, watch: Path | None) -> tuple[Model | None, Path | None]:
    """The model, unless it is still being made; and the folder to watch, if there is one."""
    from branchout.api import work_folder
    from branchout.model.checkpoint import is_saved_model

    for folder in (watch, None if model is None else Path(model)):
        if folder is not None and not folder.name:
            raise BranchoutError(f"{folder} has no name of its own; give the folder by its name")
    if model is None:
        assert watch is not None
        return (open_model(str(watch)) if is_saved_model(watch) else None), watch
    place = Path(model)
    if not place.exists() and work_folder(place).is_dir():
        if watch not in (None, place):
            raise BranchoutError(f"{place} is not finished, so it is what is watched; leave --watch {watch} out")
        return None, place
    return open_model(model), watch
