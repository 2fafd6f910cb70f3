"""The page at /docs: the OpenAPI description as HTML without scripts. FastAPI's own page loads from another host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

Schema = Mapping[str, Any]

TEMPLATE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>Branchout: HTTP API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<link rel="stylesheet" href="/style.css"><main>
{% macro table(rows) %}{% if rows %}<table>{% for name, kind, text in rows %}
<tr><td><code>{{ name }}</code><td>{{ kind }}<td>{{ text | code }}{% endfor %}</table>{% endif %}{% endmacro %}
<h1>{{ info.title }} {{ info.version }}</h1>
<p>{{ info.description }} The same for programs: <a href="/openapi.json">openapi.json</a>. <a href="/">The page</a></p>
{% for method, path, operation in operations %}
<h2><code>{{ method }} {{ path }}</code> {{ operation.summary }}</h2>
{% for paragraph in operation.get("description", "").split("\n\n") %}<p>{{ paragraph | code }}</p>{% endfor %}
{{ table(operation | rows) }}
{% endfor %}
<h1>JSON objects</h1>
{% for name, schema in schemas %}<h2 id="{{ name }}">{{ name }}</h2>{{ table(schema | fields) }}{% endfor %}
</main>"""


def documentation(api: Schema) -> str:
    """The page of an OpenAPI description: every path, then every JSON object."""
    environment = Environment(autoescape=True)
    environment.filters |= {"code": _code, "rows": _rows, "fields": _fields}
    return environment.from_string(TEMPLATE).render(
        info=api["info"],
        operations=[(m.upper(), path, each) for path, methods in api["paths"].items() for m, each in methods.items()],
        schemas=sorted(api["components"]["schemas"].items()),
    )


def _rows(operation: Schema) -> list[tuple[str, str, str]]:
    """Parameters, bodies and responses of an operation."""
    rows = [(f"?{p['name']}", _kind(p["schema"]), p.get("description", "")) for p in operation.get("parameters", [])]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(("body", kind, _kind(content["schema"])))
    for status, response in operation.get("responses", {}).items():
        kinds = [_kind(content["schema"]) for content in response.get("content", {}).values() if "schema" in content]
        rows.append((status, ", ".join(kinds), response.get("description", "")))
    return rows


def _fields(schema: Schema) -> list[tuple[str, str, str]]:
    return [(name, _kind(each), each.get("description", "")) for name, each in schema.get("properties", {}).items()]


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
