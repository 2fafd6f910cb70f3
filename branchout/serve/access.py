"""Access control: the server's own pages, programs that use its own host name, and with a token only who has it.

Any web page can make a browser send requests to 127.0.0.1, and can even give its own name that address (DNS
rebinding). The first has a foreign Origin header, the second a foreign Host header; both are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qs, quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::", ""})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^][:/?#@\s]+))(:[0-9]+)?")
_ENCODED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class HostNames:
    """The host names that a server accepts, depending on the address it listens on."""

    def __init__(self, host: str, also: Iterable[str] = ()) -> None:
        self.any_address = host in WILDCARDS
        known = {host.lower(), *(name.lower() for name in also)}
        if self.any_address or is_loopback(host):
            known |= LOOPBACK
        if self.any_address:
            known |= {socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"}
        self.known = frozenset(known - WILDCARDS)

    def __contains__(self, name: str) -> bool:
        if name in self.known:
            return True
        return self.any_address and _is_address(name)  # DNS rebinding needs a name


class Access:
    """Middleware: refuses other sites and requests without the token, and adds security headers to all responses."""

    def __init__(self, app: ASGIApp, names: HostNames, token: str | None = None) -> None:
        self.app = app
        self.names = names
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in _ENCODED if pair[0] not in given)]
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self.refusal(scope["method"], headers)
        if refusal is not None:
            await _answer(send_secured, 403, refusal)
        elif self.token is None or has_token(headers, self.token):
            await self.app(scope, receive, send_secured)
        elif login := self._login(scope):
            await _answer(send_secured, 303, "", login)
        else:
            sentence = (
                "This server needs its token. Send the header 'Authorization: Bearer TOKEN', or open the link with "
                "?token=… that `branchout serve` printed."
            )
            await _answer(send_secured, 401, sentence, {"www-authenticate": "Bearer"})

    def _login(self, scope: Scope) -> dict[str, str] | None:
        """The headers that log a browser in, for the page's address with the right ?token=."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self.token is None or scope["path"] != "/" or scope["method"] != "GET" or not _equal(given, self.token):
            return None
        cookie = f"{cookie_name(self.token)}={quote(self.token, safe='')}; Path=/; HttpOnly; SameSite=Lax"
        return {"location": "/", "set-cookie": cookie}

    def refusal(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Why a request from another site is refused, or None."""
        host = headers.get("host", "").lower()
        if host_name(host) not in self.names:
            known = ", ".join(sorted(self.names.known))
            return f"The Host {host[:80]!r} is not accepted, only {known}. See --host and --name."
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return f"Pages of {origin[:80]!r} may not use this server."
        # Browsers send this header also where they send no Origin. A link to the page (GET) is allowed.
        if method not in ("GET", "HEAD") and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return "Pages of other sites may not use this server."
        return None


async def _answer(send: Send, status: int, error: str, headers: Mapping[str, str] | None = None) -> None:
    body = json.dumps({"error": error}, ensure_ascii=False).encode() if error else b""
    given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    listed = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


def has_token(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request carries the token, as a header or as the cookie of the login link."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and _equal(given.strip(), token):
        return True
    cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
    return any(name == cookie_name(token) and _equal(unquote(value), token) for name, _, value in cookies)


def cookie_name(token: str) -> str:
    """Browsers share cookies between the ports of a host, so each server has a name of its own."""
    return f"branchout_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty if the header is invalid."""
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"].removesuffix(".")) if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
