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
SET_OFFLINE = "HF_HUB_OFFLINE is set"
_lock = Lock()


def why_offline() -> str:
    """Why the hub is not asked: it accepts no connection, or its client may not connect; else an empty string.

    Behind a proxy the former cannot be known.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return SET_OFFLINE
    try:
        address = urlsplit(constants.ENDPOINT)
        host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    except ValueError:  # no address; the client says what is wrong with it
        return ""
    proxies = getproxies()
    if not host or ((address.scheme in proxies or "all" in proxies) and not proxy_bypass(host)):
        return ""
    return "" if _accepts(host, port) else f"there is no connection to {host}"


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
    """Inside, the hub's client reads only its cache if the hub cannot be reached. Gives `why_offline()`.

    The client has one setting for the whole process, so one download runs at a time; sessions are made anew because
    clients before version 1 keep the setting in them.
    """
    from huggingface_hub import constants, utils

    def set_offline(value: bool) -> None:
        constants.HF_HUB_OFFLINE = value
        getattr(utils, "reset_sessions", lambda: None)()

    with _lock:
        offline = why_offline()
        if not offline or constants.HF_HUB_OFFLINE:
            yield offline
            return
        set_offline(True)
        try:
            yield offline
        finally:
            set_offline(False)


def reason_of(error: BaseException, offline: str) -> str:
    """Why a download failed, in one line; `offline` is what `offline_if_unreachable` gave."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    cause: BaseException | None = error
    while offline and cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return incomplete(offline)
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


def incomplete(offline: str) -> str:
    cure = "Unset it to download" if offline == SET_OFFLINE else "Check the network connection"
    return f"{offline}, and there is no complete earlier download. {cure}"
