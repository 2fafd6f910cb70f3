"""The page at /docs: the API's own description, written out as HTML that needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any


def documentation(api: Mapping[str, Any]) -> str:
    """Every path of an OpenAPI description, then every shape."""
    about = api["info"]
    body = [
        f"<h1>{escape(about['title'])} {escape(about['version'])}</h1>",
        f"<p>{escape(about['description'])} <a href='/openapi.json'>openapi.json</a> says the same to programs, ",
        "<a href='/'>the page</a> shows it to people.</p>",
    ]
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            body += _operation(method.upper(), path, operation)
    body.append("<h1>Shapes</h1>")
    for name, shape in sorted(api.get("components", {}).get("schemas", {}).items()):
        if not name.startswith(("HTTPValidation", "ValidationError")):
            body += [f"<h2 id='{escape(name)}'>{escape(name)}</h2>", *_fields(shape)]
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Branchout: HTTP API</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        "<link rel='stylesheet' href='/style.css'><main>" + "\n".join(body) + "</main>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method} {escape(path)}</code> {escape(operation.get('summary', ''))}</h2>"
    for paragraph in operation.get("description", "").split("\n\n"):
        yield f"<p>{_code(paragraph)}</p>"
    rows = [
        (f"?{each['name']}", _kind(each["schema"]), each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(("body", kind, _kind(content["schema"])))
    for status, response in operation.get("responses", {}).items():
        shapes = [_kind(content["schema"]) for content in response.get("content", {}).values() if "schema" in content]
        if status != "422" or "HTTPValidationError" not in shapes[:1]:
            rows.append((status, ", ".join(shapes), response.get("description", "")))
    yield _table(rows)


def _fields(shape: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, _kind(about), about.get("description", "")) for name, about in shape.get("properties", {}).items()]
    yield _table(rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("properties"):
        return ", ".join(f"{name}: {_kind(about)}" for name, about in schema["properties"].items())
    default = f", default {schema['default']!r}" if schema.get("default") is not None else ""
    return f"{schema.get('format') or schema.get('type', 'anything')}{default}"


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{_code(text)}" for name, kind, text in rows
    )
    return f"<table>{cells}</table>" if rows else ""


def _code(text: str) -> str:
    """Text with `code` marked as such."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
