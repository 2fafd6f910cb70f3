"""Whether the Hugging Face hub can be reached. Its client tries for most of a minute and prints every attempt."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Inside, the hub's client uses only its cache if the hub's address cannot be resolved.

    Gives what to say of the connection: empty where the hub can be reached. Behind a proxy that cannot be known.
    """
    from huggingface_hub import constants

    host, before = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT, constants.HF_HUB_OFFLINE
    reached = before or bool(getproxies()) or _is_resolved(host)
    constants.HF_HUB_OFFLINE = before or not reached
    try:
        yield "" if reached else f"there is no connection to {host}, and no earlier download"
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_resolved(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # the latter of a host name that cannot be one
        return False
    return True
