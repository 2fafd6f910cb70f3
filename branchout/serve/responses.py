"""JSON answers, and one error format for everything that is refused: `{"error": a sentence}`."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from branchout.errors import BranchoutError
from branchout.serve.access import HEADERS
from branchout.serve.api_docs import not_found
from branchout.serve.limits import Refused

BODY = "Send JSON with Content-Type: application/json; /docs has an example."
BODIES = {
    "/operating-point": 'Send JSON such as {"goal": "avg"} or {"b": 1.3}, with Content-Type: application/json.',
}
"""Examples by path."""


class FiniteJSON(JSONResponse):
    """JSON with null in place of NaN and infinity."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:
            return super().render(finite(content))


def finite(value: Any) -> Any:
    """The same data with None for numbers that JSON does not have: NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def event(content: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(finite(content), ensure_ascii=False)}\n\n"


def has_inbox(request: Request) -> bool:
    return request.app.state.inbox is not None


def _http(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:80]
    if isinstance(error, Refused):
        meant = {} if error.similar is None else {"similar": error.similar}
        return FiniteJSON({"error": error.detail, **meant}, error.status_code, error.headers)
    if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
        return Response(not_found(path, has_inbox=has_inbox(request)), 404, media_type="text/html; charset=utf-8")
    close = difflib.get_close_matches(path, request.app.openapi()["paths"], n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    sentences = {
        404: f"{path} does not exist. {hint}See /docs for all paths.",
        405: f"{path} does not accept {request.method}. See /docs.",
    }
    sentence = sentences.get(error.status_code, str(error.detail))
    return FiniteJSON({"error": sentence}, error.status_code, error.headers)


def _user_error(_: Request, error: BranchoutError) -> JSONResponse:
    return FiniteJSON({"error": str(error)}, 422)


def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    errors: Sequence[Mapping[str, Any]] = error.errors()
    found = [(".".join(str(part) for part in e["loc"] if part not in ("query", "body")), e["msg"]) for e in errors[:3]]
    sentence = "; ".join(f"{where}: {what}" if where else str(what) for where, what in found)
    in_body = any(e["loc"][:1] == ("body",) for e in errors)
    body = BODIES.get(request.url.path, BODY)
    return FiniteJSON({"error": f"{sentence}. {body}" if in_body else sentence}, 422)


def _failed(_: Request, error: Exception) -> JSONResponse:
    # This answer does not pass the middleware, so it needs the headers here.
    return FiniteJSON({"error": f"The server failed at this request ({type(error).__name__})."}, 500, HEADERS)


HANDLERS: dict[int | type[Exception], Any] = {
    HTTPException: _http,
    BranchoutError: _user_error,
    RequestValidationError: _invalid,
    Exception: _failed,
}
