"""Serving a model on this machine."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from branchout.cli import options
from branchout.cli.app import app, check_folders, check_order, open_model, quoted, say, then, warn
from branchout.errors import BranchoutError
from branchout.progress import Event, OnProgress

if TYPE_CHECKING:
    from branchout.api import Model
    from branchout.serve.inbox import InboxSettings
    from branchout.serve.limits import Limits

SHORTEST_TOKEN = 12
QUIET_SECONDS = 5.0
"""Between two lines about labelled images."""


@app.command(epilog="Example: branchout serve v2/ test_photos/")
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A saved model, or the --out of a running extension.")
    ] = None,
    test: Annotated[Path | None, options.Labelled] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one beyond this machine needs --public.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8000,
    public: Annotated[
        bool, typer.Option("--public", help="Allow a --host that other machines can reach. Requests need a token.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar="BRANCHOUT_TOKEN", help="The token that requests need; --public generates one."),
    ] = None,
    watch: Annotated[
        Path | None, typer.Option("--watch", metavar="OUT", help="Show the progress of an extension to OUT.")
    ] = None,
    inbox: Annotated[
        Path | None,
        typer.Option("--inbox", metavar="PHOTOS", help="A folder of new photos to name and teach, at /inbox."),
    ] = None,
    memory: options.Memory = None,
    classes_from: options.ClassesFrom = None,
    max_mb: Annotated[float, typer.Option(min=0.001, help="The largest image file to accept, in MB.")] = 20.0,
    batch: Annotated[int, typer.Option(min=1, help="The largest batch of images.")] = 32,
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="Another host name of this machine to accept.")
    ] = None,
    device: options.Device = None,
) -> None:
    """Serve a model: a local page and an HTTP API.

    With TEST the page also compares accuracies on these images before and after the last step. With --inbox, new
    photos can be named and taught (give --memory too). Stop with Ctrl-C.
    """
    try:
        from branchout.serve.limits import Limits
    except ModuleNotFoundError as error:
        raise BranchoutError(f"Serving needs {error.name}. Type: pip install 'branchout[serve]'") from None
    try:
        token = _token(host, public, token)
        limits = Limits(file_bytes=int(max_mb * 1e6), batch=batch, waiting=max(256, 4 * batch))
        settings = _inbox(inbox, memory, test, classes_from)
        _serve(model, test, (host, port), watch, limits, name or [], token, device, settings, classes_from)
    except KeyboardInterrupt:
        sys.exit(0)  # the way to stop it, even while it is loading


def _inbox(
    photos: Path | None, memory: Path | None, test: Path | None, classes_from: str | None
) -> InboxSettings | None:
    from branchout.serve.inbox import InboxSettings

    if photos is None:
        if memory is not None:
            raise BranchoutError("--memory is for --inbox: the old images that a run of the inbox is given.")
        return None
    if memory is None and test is None:
        raise BranchoutError("--inbox needs images of known classes to tell unknown ones from: add --memory OLD/")
    return InboxSettings(photos, memory, test, classes_from=classes_from)


def _token(host: str, public: bool, token: str | None) -> str | None:
    """The token that requests need. A server that other machines can reach always has one."""
    from branchout.serve.access import is_loopback

    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise BranchoutError(f"--token needs at least {SHORTEST_TOKEN} printable ASCII characters.")
    if is_loopback(host):
        return token
    if not public:
        raise BranchoutError(
            f"Other machines can reach --host {host}. Add --public to allow this (requests then need a token), or "
            "leave --host out to serve this machine only."
        )
    return token or secrets.token_urlsafe(24)


def _serve(
    model: str | None,
    test: Path | None,
    listen_on: tuple[str, int],
    watch: Path | None,
    limits: Limits,
    names: list[str],
    token: str | None,
    device: str | None,
    inbox: InboxSettings | None,
    classes_from: str | None,
) -> None:
    from branchout.serve.access import HostNames
    from branchout.serve.app import create_app
    from branchout.serve.server import address, listen, serve

    host, port = listen_on
    place = model if model is not None else str(watch or "")
    if not place:
        raise BranchoutError("No model was given. Type: branchout serve MODEL, or branchout serve --watch OUT")
    check_order(place, [test])
    check_folders(test, classes_from=classes_from)
    with listen(host, port, again=f"branchout serve {quoted(place)}") as sock:
        opened, watch = _open(model, watch, device)
        served = create_app(
            opened,
            names=HostNames(host, names),
            token=token,
            limits=limits,
            watch=watch,
            test=test,
            model_path=place.rstrip("/") or place,
            device=device,
            on_progress=_reading(),
            inbox=inbox,
            classes_from=classes_from,
        )
        here = address(sock, host)
        what = f"waiting for {watch}" if opened is None else f"{place}: {len(opened.classes):,} classes"
        say(f"{what}, at {here} (API: {here}/docs; stop with Ctrl-C)")
        if inbox is not None:
            say(f"the inbox {inbox.folder}: {here}/inbox")
            _warn_of_other_model(inbox.folder, place)
        if token is None:
            then(f"curl -F files=@photo.jpg {here}/predict")
        else:
            say(f"open {here}/?token={quote(token, safe='')} in a browser, or send the token with each request.")
            then(f"curl -H {quoted(f'Authorization: Bearer {token}')} -F files=@photo.jpg {here}/predict")
        sys.stdout.flush()
        serve(served, sock)


def _warn_of_other_model(photos: Path, place: str) -> None:
    """Photos that were taught to another model are not listed any more, and the one served does not know them."""
    from branchout.inbox.folder import Inbox
    from branchout.inbox.runs import live_model

    live = live_model(Inbox(photos))
    if live is not None and Path(live).resolve() != Path(place).resolve():
        warn([f"the photos of this inbox were last taught to {live}, which is not the model that is served"])


def _reading() -> OnProgress:
    """Print how far the labelled images are read: at the start, every few seconds, and at the end."""
    from branchout.report.labelled_results import THUMBNAILS

    last = [float("-inf")]

    def on_progress(event: Event) -> None:
        now, finished = time.monotonic(), event.work == THUMBNAILS and event.done == event.total
        if finished:
            say("The labelled images are read: the page has accuracies, tables and images.")
        elif now > last[0] + QUIET_SECONDS:
            last[0] = now
            say(f"Reading the labelled images ({event.work}): {event.done:,} of {event.total:,}")
        sys.stdout.flush()

    return on_progress


def _open(model: str | None, watch: Path | None, device: str | None) -> tuple[Model | None, Path | None]:
    """The model, or None while it is being trained; and the folder to watch, if there is one."""
    from branchout.model.manifest import is_saved_model
    from branchout.training.work_folder import work_folder

    for folder in (watch, None if model is None else Path(model)):
        if folder is not None and not folder.name:
            raise BranchoutError(f"{folder} has no name. Give the folder by its name.")
    if model is None:
        assert watch is not None
        return (open_model(str(watch), device=device) if is_saved_model(watch) else None), watch
    place = Path(model)
    if not place.exists() and work_folder(place).is_dir():
        if watch not in (None, place):
            raise BranchoutError(f"{place} is not finished and is watched itself. Leave out --watch {watch}.")
        return None, place
    return open_model(model, device=device), watch
