"""The image files of a request. A file's name is only ever shown, and only its last part."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import UploadFile
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as FormFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from branchout.serve.limits import Limits, Refused

FIELD = "files"
UNNAMED = "image"
HOW = (
    f"Send images as multipart/form-data in the field '{FIELD}' (curl -F {FIELD}=@photo.jpg), or one image as the "
    "body with its type (curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg)."
)


class _Parser(MultiPartParser):
    """Starlette's parser, which does not report by itself that the end of a form is missing."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


@asynccontextmanager
async def uploaded_files(request: Request, limits: Limits) -> AsyncIterator[list[UploadFile]]:
    """The files of a request in their order, deleted at the end. Files above 1 MB are kept on disk."""
    kind, _ = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        parser = _Parser(request.headers, request.stream())
        try:
            form = await parser.parse()
        except (MultiPartException, FormParserError, UnicodeError) as error:
            reason = error.message if isinstance(error, MultiPartException) else str(error)
            raise Refused(400, f"The form cannot be read: {reason}") from None
        try:
            if not parser.complete:
                raise Refused(400, "The form is truncated: its last boundary is missing.")
            yield _files(form, limits)
        finally:
            await form.close()
    elif kind.startswith(b"image/"):
        body = io.BytesIO()
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limits.file_bytes:
                body.write(chunk)
        body.seek(0)
        yield [UploadFile(body, size=size, filename=UNNAMED)]
    else:
        found = kind.decode("latin-1") or "missing"
        raise Refused(415, f"The request's Content-Type is {_short(found)}. {HOW}")


def _files(form: FormData, limits: Limits) -> list[UploadFile]:
    found = []
    for field, value in form.multi_items():
        if field != FIELD:
            raise Refused(400, f"The form has a field {_short(field)!r}. Put images into the field '{FIELD}'.")
        if not isinstance(value, FormFile):
            raise Refused(400, f"The form's field '{FIELD}' holds text, not a file. {HOW}")
        found.append(UploadFile(value.file, size=value.size, filename=safe_name(value.filename or "")))
    if len(found) > limits.files:
        raise Refused(413, f"The request has {len(found)} images; at most {limits.files} are accepted at a time.")
    return found


def safe_name(name: str) -> str:
    """The last part of a Unix or Windows path, without control characters."""
    last = re.split(r"[\\/]", name)[-1]
    visible = "".join(c for c in last if not unicodedata.category(c).startswith("C")).strip()
    return UNNAMED if visible in {"", ".", ".."} else _short(visible, 120)


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
