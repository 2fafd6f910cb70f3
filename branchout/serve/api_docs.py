"""The page at /docs: the OpenAPI description as HTML. FastAPI's own page loads its scripts from another host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from branchout.report.page import rendered

Schema = Mapping[str, Any]
Row = tuple[str, str, Markup]
"""A name, its type, and what it means."""

_JSON = "-H 'Content-Type: application/json'"
CURL = {
    "POST /predict": "-F files=@photo.jpg '{}/predict?top=3'",
    "PUT /operating-point": """-X PUT -H 'Content-Type: application/json' -d '{{"goal": "avg"}}' {}/operating-point""",
    "GET /classes": "'{}/classes?search=robin'",
    "GET /progress/events": "-N {}/progress/events",
    "GET /inbox/photo/{photo}": "-o photo.png {}/inbox/photo/ID",
    "POST /inbox/decisions": f"""{_JSON} -d '{{{{"photos": ["ID"], "action": "dismiss"}}}}' {{}}/inbox/decisions""",
    "PUT /inbox/false-alarms": f"""-X PUT {_JSON} -d '{{{{"share": 0.2}}}}' {{}}/inbox/false-alarms""",
    "POST /inbox/runs": f"{_JSON} -d '{{{{}}}}' {{}}/inbox/runs",
    "POST /inbox/run": f"""{_JSON} -d '{{{{"action": "accept"}}}}' {{}}/inbox/run""",
}
"""What follows `curl` where it is more than a method and an address."""


@dataclass(frozen=True)
class Operation:
    """One route."""

    anchor: str
    name: str
    summary: str
    description: list[Markup]
    curl: str
    rows: list[Row]


def documentation(api: Schema, base: str, *, has_inbox: bool, photo: str = "ID") -> str:
    """The page of an OpenAPI description: all paths with curl lines for the server at `base`, all objects.

    `photo` is a photo of the inbox for the curl lines.
    """
    info, schemas = api["info"], sorted(api["components"]["schemas"].items())
    return rendered(
        "docs.html",
        title="HTTP API",
        lead=f"{info['description']} Version {info['version']}. If the server has a token, add "
        "-H 'Authorization: Bearer TOKEN' to each command.",
        operations=[
            _operation(path, method, each, base, photo)
            for path, m in api["paths"].items()
            for method, each in m.items()
        ],
        schemas=[(name, _fields(schema)) for name, schema in schemas],
        has_inbox=has_inbox,
    )


def not_found(path: str, *, has_inbox: bool) -> str:
    """The page for an address that does not exist."""
    lead = f"{path} does not exist on this server. These pages do:"
    return rendered("docs.html", title="Page not found", lead=lead, operations=[], schemas=[], has_inbox=has_inbox)


def _operation(path: str, method: str, each: Schema, base: str, photo: str) -> Operation:
    name = f"{method.upper()} {path}"
    option = "" if method == "get" else f"-X {method.upper()} "
    curl = CURL.get(name, option + "{}" + re.sub(r"\{\w+\}", "0", path))
    return Operation(
        anchor=re.sub(r"\W+", "-", name.lower()).strip("-"),
        name=name,
        summary=each["summary"],
        description=[_code(paragraph) for paragraph in each.get("description", "").split("\n\n")],
        curl=f"curl {curl.replace('ID', photo).format(base)}",
        rows=_rows(each),
    )


def _rows(operation: Schema) -> list[Row]:
    """Parameters, bodies and responses of an operation."""
    rows = [
        (f"?{p['name']}" if p["in"] == "query" else p["name"], _kind(p["schema"]), _code(p.get("description", "")))
        for p in operation.get("parameters", [])
    ]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(("body", kind, escape(_kind(content["schema"]))))
    for status, response in operation.get("responses", {}).items():
        kinds = [_kind(content["schema"]) for content in response.get("content", {}).values() if "schema" in content]
        rows.append((status, ", ".join(kinds), _code(response.get("description", ""))))
    return rows


def _fields(schema: Schema) -> list[Row]:
    found = schema.get("properties", {}).items()
    return [(name, _kind(each), _code(each.get("description", ""))) for name, each in found]


def _kind(schema: Schema) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("properties"):
        return ", ".join(f"{name}: {_kind(each)}" for name, each in schema["properties"].items())
    default = f", default {schema['default']!r}" if schema.get("default") is not None else ""
    return f"{schema.get('format') or schema.get('type', 'anything')}{default}"


def _code(text: str) -> Markup:
    """Text with `code` marked as such."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))
