"""How much one server accepts at a time: bytes, pixels, seconds and requests. Everything beyond is refused."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.requests import Request

RETRY_SOON = {"Retry-After": "1"}
JPEG_PIXELS = 2
"""A JPEG may have this many times the pixels of another image: it is decoded at a reduced size."""
JPEG_COST = 0.25
"""What a pixel of a JPEG costs, measured in pixels of other formats."""


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
    uploads: int = 512
    """Requests that are uploading at the same time."""
    upload_bytes: int = 1_000_000_000
    """Of all requests together, while they are uploading or waiting to be decoded."""
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
        """Of a whole request: as many files as are allowed, with the headers of each part of the form."""
        return self.files * (self.file_bytes + 10_000)


class Refused(Exception):  # noqa: N818 – an answer
    """A request that is answered with an error status and a sentence."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers or {}


class Uploads:
    """The request bodies that are uploading or held, over all requests."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open = 0
        self.bytes = 0

    @contextmanager
    def add(self) -> Iterator[Callable[[int], None]]:
        """One more body. Gives a function to be called with the length of each piece that is kept."""
        if self.open >= self.limits.uploads:
            raise Refused(503, "Too many requests are uploading. Try again in a second.", RETRY_SOON)
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            if self.bytes + count > self.limits.upload_bytes:
                raise Refused(503, "Too many bytes are being uploaded. Try again in a second.", RETRY_SOON)
            held += count
            self.bytes += count

        self.open += 1
        try:
            yield hold
        finally:
            self.open -= 1
            self.bytes -= held


async def body_of(request: Request, limits: Limits, hold: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    """The body in the pieces in which it arrives, up to the limits of size, time and rate."""
    too_large = Refused(
        413,
        f"The request is larger than {megabytes(limits.body_bytes)}. Send at most {limits.files} images of "
        f"{megabytes(limits.file_bytes)} at a time.",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise too_large
    clock = asyncio.get_running_loop().time
    stream = request.stream()
    waited, count = 0.0, 0  # only the time spent waiting for the client counts
    while True:
        allowed = min(limits.body_seconds, limits.body_grace + count / limits.body_rate)
        start = clock()
        try:
            async with asyncio.timeout(allowed - waited):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise Refused(
                408,
                f"The request's body arrived too slowly: {count:,} bytes in {waited + clock() - start:.0f} seconds. "
                f"At least {limits.body_rate:,.0f} bytes per second are expected.",
                {"Connection": "close"},
            ) from None
        if chunk is None:
            return
        waited += clock() - start
        count += len(chunk)
        if count > limits.body_bytes:
            raise too_large
        hold(len(chunk))
        yield chunk


class PixelBudget:
    """Lets images be decoded at the same time as long as their pixels together stay within a total; first come, first
    served.
    """

    def __init__(self, total: int) -> None:
        self.free = float(total)
        self.total = float(total)
        self._queue: deque[tuple[float, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, cost: float) -> AsyncIterator[None]:
        cost = min(cost, self.total)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((cost, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.free += cost
            else:
                self._queue.remove((cost, turn))
            self._admit()

    def _admit(self) -> None:
        while self._queue and self._queue[0][0] <= self.free:
            cost, turn = self._queue.popleft()
            if turn.cancelled():
                continue
            self.free -= cost
            turn.set_result(None)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g} MB" if count < 1e9 else f"{count / 1e9:,.3g} GB"
