"""Access control: the server's own pages, programs that use its own host name, and with a token only who has it.

Any web page can make a browser send requests to 127.0.0.1, and can even give its own name that address (DNS
rebinding). The first has a foreign Origin header, the second a foreign Host header; both are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
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
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer: ASGIApp = self.refusal(Request(scope)) or self.app
        await answer(scope, receive, send_secured)

    def refusal(self, request: Request) -> Response | None:
        """The response to a request that is not allowed, or to the login link; None for all others."""
        if reason := self._foreign(request):
            return JSONResponse({"error": reason}, 403)
        if self.token is None or has_token(request, self.token):
            return None
        login = request.method == "GET" and request.scope["path"] == "/"
        if login and _equal(request.query_params.get("token", ""), self.token):
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie_name(self.token), self.token, httponly=True, samesite="lax")
            return response
        sentence = (
            "This server needs its token. Send the header 'Authorization: Bearer TOKEN', or open the link with "
            "?token=… that `branchout serve` printed."
        )
        return JSONResponse({"error": sentence}, 401, {"www-authenticate": "Bearer"})

    def _foreign(self, request: Request) -> str | None:
        """Why a request comes from another site, or None."""
        host = request.headers.get("host", "").lower()
        if host_name(host) not in self.names:
            known = ", ".join(sorted(self.names.known))
            return f"The Host {host[:80]!r} is not accepted, only {known}. See --host and --name."
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return f"Pages of {origin[:80]!r} may not use this server."
        # Browsers send this header also where they send no Origin. A link to the page (GET) is allowed.
        site = request.headers.get("sec-fetch-site")
        if request.method not in ("GET", "HEAD") and site in ("cross-site", "same-site"):
            return "Pages of other sites may not use this server."
        return None


def has_token(request: Request, token: str) -> bool:
    """Whether a request carries the token, as a header or as the cookie of the login link."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    in_header = scheme.lower() == "bearer" and _equal(given.strip(), token)
    return in_header or _equal(request.cookies.get(cookie_name(token), ""), token)


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
