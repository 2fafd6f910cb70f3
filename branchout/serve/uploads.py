"""Pictures out of a request that nobody vouches for, one at a time and never more than one in memory.

The body is read as it comes in. What goes beyond a limit is dropped, not kept; a file's name is only ever echoed, and
only its last part.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import AsyncIterator
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

FIELD = "files"
UNNAMED = "picture"
HOW = (
    f"Send pictures as multipart/form-data in the field '{FIELD}' (curl -F {FIELD}=@photo.jpg), or one picture as the "
    "body, with its type (curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg)"
)


@dataclass(frozen=True)
class Limits:
    """What one server takes on. Everything beyond is refused in a sentence."""

    file_bytes: int = 20_000_000
    files: int = 32
    """Pictures in one request."""
    pixels: int = 50_000_000
    """Of one picture, once it is decoded."""
    seconds: float = 120.0
    """In which a request must have arrived."""
    requests: int = 64
    """That are read or answered at the same time."""
    waiting: int = 256
    """Pictures in the queue before the model."""
    batch: int = 32
    """Pictures the model is given at once."""
    linger: float = 0.003
    """Seconds a batch that is not full waits for requests that are on the way."""

    @property
    def body_bytes(self) -> int:
        """A whole request: as many files as are allowed, with what the form adds to each."""
        return self.files * (self.file_bytes + 10_000)


class Refused(Exception):  # noqa: N818 – an answer
    """A request that is answered with a status and a sentence instead of what it asked for."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers or {}


@dataclass(frozen=True)
class Upload:
    """One file of a request."""

    name: str
    data: bytes
    too_large: bool = False


async def uploads(request: Request, limits: Limits) -> AsyncIterator[Upload]:
    """The files of a request in their order, each as soon as it is there."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        if not options.get(b"boundary"):
            raise Refused(400, "the form's Content-Type names no boundary, so its parts cannot be told apart")
        parts = _Parts(limits)
        try:
            parser = MultipartParser(options[b"boundary"], parts.callbacks())  # type: ignore[arg-type]
            async for chunk in _chunks(request, limits):
                parser.write(chunk)
                while parts.finished:
                    yield parts.finished.pop(0)
        except (FormParserError, UnicodeError) as error:
            raise Refused(400, f"the form cannot be read: {error}") from None
        if not parts.complete:
            raise Refused(400, "the form ends before its last boundary; it was cut short")
    elif kind.startswith(b"image/"):
        file = _File(UNNAMED, limits.file_bytes)
        async for chunk in _chunks(request, limits):
            file.add(chunk)
        yield file.upload()
    else:
        found = kind.decode("latin-1") or "nothing"
        raise Refused(415, f"the request's Content-Type is {_short(found)}. {HOW}")


async def _chunks(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """The body in the pieces in which it arrives, up to the limits of size and time."""
    too_much = Refused(
        413,
        f"the request is larger than {_megabytes(limits.body_bytes)}: at most {limits.files} pictures of "
        f"{_megabytes(limits.file_bytes)} at a time",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise too_much
    deadline = asyncio.get_running_loop().time() + limits.seconds
    stream = request.stream()
    count = 0
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            count += len(chunk)
            if count > limits.body_bytes:
                raise too_much
            yield chunk
    except TimeoutError:
        raise Refused(408, f"the request had not arrived after {limits.seconds:g} seconds") from None


class _File:
    """The bytes of a file up to the limit; beyond it they are only noticed."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.data = bytearray()
        self.too_large = False

    def add(self, data: bytes) -> None:
        if self.too_large or len(self.data) + len(data) > self.limit:
            self.too_large = True
            self.data.clear()
        else:
            self.data += data

    def upload(self) -> Upload:
        return Upload(self.name, bytes(self.data), self.too_large)


class _Parts:
    """What the parser tells of a form, gathered into files."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.finished: list[Upload] = []
        self.complete = False
        self._count = 0
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._file: _File | None = None

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._open,
            "on_part_data": self._data,
            "on_part_end": self._close,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._disposition = b""
        self._file = None

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field != FIELD:
            raise Refused(400, f"the form has a field {_short(field)!r}; pictures go into the field '{FIELD}'")
        if b"filename" not in options:
            raise Refused(400, f"the form's field '{FIELD}' holds text, not a file. {HOW}")
        self._count += 1
        if self._count > self.limits.files:
            raise Refused(413, f"at most {self.limits.files} pictures are taken at a time; send the rest after them")
        self._file = _File(safe_name(options[b"filename"].decode("utf-8", "replace")), self.limits.file_bytes)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.add(data[start:end])

    def _close(self) -> None:
        if self._file is not None:
            self.finished.append(self._file.upload())

    def _end(self) -> None:
        self.complete = True


def safe_name(name: str) -> str:
    """The last part of a path of either kind, without what cannot be seen; it is echoed and never opened."""
    last = re.split(r"[\\/]", name)[-1]
    seen = "".join(c for c in last if not unicodedata.category(c).startswith("C")).strip()
    return UNNAMED if seen in {"", ".", ".."} else _short(seen, 120)


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g} MB" if count < 1e9 else f"{count / 1e9:,.3g} GB"
