"""Whether the Hugging Face hub can be reached. Its client tries for most of a minute and prints every attempt."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from branchout.errors import first_line

SECONDS = 5.0
"""How long the hub may take to accept a connection."""
NEXT_ADDRESS = 0.25
"""Seconds until a host's next address is tried beside those that have not answered."""
_lock = Lock()


def unreachable_host() -> str:
    """The hub's host if it accepts no connection, else an empty string; behind a proxy that cannot be known."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:  # the client will not connect
        return ""
    try:
        address = urlsplit(constants.ENDPOINT)
        host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    except ValueError:  # no address; the client says what is wrong with it
        return ""
    proxies = getproxies()
    if not host or ((address.scheme in proxies or "all" in proxies) and not proxy_bypass(host)):
        return ""
    return "" if _accepts(host, port) else host


def _accepts(host: str, port: int) -> bool:
    """Whether a host accepts a connection in time. The thread may have to be left behind: where no name server
    answers, a lookup takes longer and cannot be stopped. The caller's thread may have an event loop of its own."""
    accepted = Event()

    def connect() -> None:
        with suppress(OSError, UnicodeError):  # the latter of a name that no host can have
            socket.getaddrinfo(host, port)  # here, because asyncio would wait for the thread of its own lookup
            asyncio.run(_connect(host, port))
            accepted.set()

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return accepted.is_set()


async def _connect(host: str, port: int) -> None:
    connecting = asyncio.open_connection(host, port, happy_eyeballs_delay=NEXT_ADDRESS)
    _, connection = await asyncio.wait_for(connecting, SECONDS)
    connection.close()


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Inside, the hub's client reads only its cache if the hub cannot be reached. Gives `unreachable_host()`.

    The client has one setting for the whole process, so one download runs at a time; sessions are made anew because
    clients before version 1 keep the setting in them.
    """
    from huggingface_hub import constants, utils

    def set_offline(value: bool) -> None:
        constants.HF_HUB_OFFLINE = value
        getattr(utils, "reset_sessions", lambda: None)()

    with _lock:
        host = unreachable_host()
        if not host:
            yield host
            return
        set_offline(True)
        try:
            yield host
        finally:
            set_offline(False)


def reason_of(error: BaseException, host: str) -> str:
    """Why a download failed, in one line; `host` is what `offline_if_unreachable` gave."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    cause: BaseException | None = error
    while host and cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return no_connection(host)
        cause = cause.__cause__ or cause.__context__
    return first_line(error).rstrip(".")


def no_connection(host: str) -> str:
    return f"there is no connection to {host}, and no complete earlier download"
