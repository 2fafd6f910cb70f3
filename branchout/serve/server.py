"""The socket and the HTTP server around the app."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import warnings

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from branchout.errors import BranchoutError
from branchout.serve.limits import Limits

GRACE = 10
"""Seconds for running requests to finish when the server stops."""


def listen(host: str, port: int, *, again: str = "branchout serve MODEL") -> socket.socket:
    """A socket that listens on the address; port 0 takes any free one. The error for a port in use names a free one.

    `again` is the command without its port, for this error.
    """
    try:
        return _bound(host, port)
    except socket.gaierror:
        raise BranchoutError(f"The address {host!r} is unknown. Leave out --host.") from None
    except OverflowError:
        raise BranchoutError(f"--port must be at most 65535, not {port}.") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise BranchoutError(f"{host} is not an address of this machine. Leave out --host.") from None
        why = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        free = _free(host, port)
        raise BranchoutError(f"Port {port} of {host} {why}. Port {free} is free: {again} --port {free}") from None


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just stopped keeps its port
        sock.bind(address)
        sock.listen(2048)  # from now on clients wait instead of being refused
    except BaseException:
        sock.close()
        raise
    return sock


def _free(host: str, taken: int) -> int:
    """The next free port above 1023, or any free one."""
    for port in [*range(max(taken, 1023) + 1, min(max(taken, 1023) + 50, 65536)), 0]:
        try:
            with _bound(host, port) as sock:
                return int(sock.getsockname()[1])
        except OSError:
            continue
    raise BranchoutError(f"No port of {host} can be used.")


def address(sock: socket.socket, host: str) -> str:
    """The address to open in a browser."""
    shown = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a time limit for the headers of each request: it has none of its own."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        """The timer runs while no request is being answered and new bytes are incomplete headers."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._header_timer is None:
            limits: Limits = self.config.app.state.service.limits  # type: ignore[union-attr]
            self._header_timer = self.loop.call_later(limits.header_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def server_of(app: FastAPI) -> uvicorn.Server:
    """A server that logs only its own failures."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
    )
    server = uvicorn.Server(config)
    app.state.service.stopping = lambda: server.should_exit
    return server


def serve(app: FastAPI, sock: socket.socket) -> None:
    """Serve until Ctrl-C."""
    # A broken form or image is reported to the client, not in the server's log.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="PIL")
    try:
        server_of(app).run(sockets=[sock])
    except KeyboardInterrupt:
        pass
    finally:
        sock.close()
