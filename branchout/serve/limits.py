"""How much one server accepts at a time: bytes, pixels, seconds and requests. Everything beyond is refused."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_SOON = {"Retry-After": "1"}
JPEG_PIXELS = 2
"""A JPEG may have this many times the pixels of another image: it is decoded at a reduced size."""
JPEG_COST = 0.25
"""What a pixel of a JPEG costs, measured in pixels of other formats."""
UPLOAD_PATH = "/predict"


@dataclass(frozen=True)
class Limits:
    """The limits of one server."""

    file_bytes: int = 20_000_000
    files: int = 32
    """Images in one request."""
    pixels: int = 25_000_000
    """Of one image; twice as many for a JPEG."""
    request_pixels: int = 100_000_000
    """Of all images of one request; a pixel of a JPEG counts a quarter."""
    decoding_pixels: int = 25_000_000
    """Of all images above `small_pixels` that are decoded at the same time, counted likewise."""
    small_pixels: int = 2_000_000
    """Images up to this size never wait for larger ones."""
    header_seconds: float = 10.0
    """In which the headers of a request must arrive."""
    body_seconds: float = 120.0
    """In which the body of a request must arrive."""
    body_grace: float = 10.0
    """Seconds before `body_rate` is required."""
    body_rate: float = 20_000.0
    """Bytes per second that a body must have on average."""
    json_bytes: int = 10_000
    """Of the body of a request without images."""
    uploads: int = 512
    """Requests with a body at the same time."""
    upload_bytes: int = 1_000_000_000
    """Of the bodies of all requests together."""
    requests: int = 64
    """That are decoded or answered at the same time."""
    waiting: int = 256
    """Images in the queue before the model."""
    batch: int = 32
    """Images in one batch of the model."""
    linger: float = 0.003
    """Seconds that an incomplete batch waits for requests that are being read."""

    @property
    def body_bytes(self) -> int:
        """Of a request with images: as many files as are allowed, with the headers of each part of the form."""
        return self.files * (self.file_bytes + 10_000)


class Refused(HTTPException):
    """A request that is answered with an error status and a sentence."""

    similar: str | None = None
    """The class that was probably meant; it is part of the answer."""


class BodyLimits:
    """Middleware that limits the size and the duration of every request body, and of all of them together."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.open = 0
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(self, scope, receive)
        try:
            await self.app(scope, body.receive, send)
        finally:
            self.bytes -= body.count
            self.open -= body.started


class _Body:
    """The body of one request. Only the time spent waiting for the client counts."""

    def __init__(self, all_bodies: BodyLimits, scope: Scope, receive: Receive) -> None:
        self.all = all_bodies
        self.limits = all_bodies.limits
        self.upload = scope["path"] == UPLOAD_PATH
        self.most = self.limits.body_bytes if self.upload else self.limits.json_bytes
        self.declared = Headers(scope=scope).get("content-length", "")
        self._receive = receive
        self.started = self.complete = False
        self.count = 0
        self.waited = 0.0

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()  # waits for the client to disconnect, however long
        if not self.started:
            self._start()
        message = await self._in_time()
        size = len(message.get("body", b""))
        if self.count + size > self.most:
            raise self._too_large()
        if self.all.bytes + size > self.limits.upload_bytes:
            raise Refused(503, "Too many bytes are being uploaded. Try again in a second.", RETRY_SOON)
        self.count += size
        self.all.bytes += size
        self.complete = not message.get("more_body", False)
        return message

    def _start(self) -> None:
        if self.declared.isdecimal() and int(self.declared) > self.most:
            raise self._too_large()
        if self.all.open >= self.limits.uploads:
            raise Refused(503, "Too many requests are uploading. Try again in a second.", RETRY_SOON)
        self.started = True
        self.all.open += 1

    async def _in_time(self) -> Message:
        limits, clock = self.limits, asyncio.get_running_loop().time
        allowed = min(limits.body_seconds, limits.body_grace + self.count / limits.body_rate)
        start = clock()
        try:
            async with asyncio.timeout(allowed - self.waited):
                return await self._receive()
        except TimeoutError:
            raise Refused(
                408,
                f"The request's body arrived too slowly: {self.count:,} bytes in {self.waited + clock() - start:.0f} "
                f"seconds. At least {limits.body_rate:,.0f} bytes per second are expected.",
                {"Connection": "close"},
            ) from None
        finally:
            self.waited += clock() - start

    def _too_large(self) -> Refused:
        sentence = f"The request's body is larger than {megabytes(self.most)}."
        if self.upload:
            sentence += f" Send at most {self.limits.files} images of {megabytes(self.limits.file_bytes)} at a time."
        return Refused(413, sentence)


class PixelBudget:
    """Limits the pixels of all images that are decoded at the same time. First come, first served."""

    def __init__(self, total: int) -> None:
        self.free = float(total)
        self.total = float(total)
        self._queue: deque[tuple[float, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, cost: float) -> AsyncIterator[None]:
        cost = min(cost, self.total)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((cost, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if not admitted.cancelled():
                self.free += cost
            self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self.free):
            cost, admitted = self._queue.popleft()
            if not admitted.cancelled():
                self.free -= cost
                admitted.set_result(None)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g} MB" if count < 1e9 else f"{count / 1e9:,.3g} GB"
