"""Write the description of the operations as a page. It loads nothing and runs nothing."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from specjax.server.fields import NOT_SUPPORTED

STYLE = """
:root { color-scheme: light dark; --line: #d5d9de; --soft: #5b6570; --card: #f5f7f9; --tag: #0b6e4f }
@media (prefers-color-scheme: dark) { :root { --line: #333b45; --soft: #9aa6b2; --card: #171c22; --tag: #6fd3ac } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem }
code, summary b { font-family: ui-monospace, monospace; font-size: .92em }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: .5rem .8rem }
details details { background: var(--card) }
summary { cursor: pointer; overflow-wrap: anywhere }
summary i { color: var(--tag); font-style: normal; font-weight: 600 }
summary span, td span { color: var(--soft) }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { border-top: 1px solid var(--line); padding: .3rem .6rem .3rem 0; text-align: left; vertical-align: top }
pre { max-height: 30rem; overflow: auto }
"""


def docs_page(description: dict[str, Any]) -> str:
    """Return an HTML page of a description in the form of OpenAPI."""
    info, paths = description["info"], description["paths"]
    title = f"{info['title']} {info['version']}"
    operations = "".join(
        _operation(method.upper(), path, operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        '<p>The operations of this server, <a href="openapi.json">also as OpenAPI 3.1</a>. A field that is null counts '
        f"as absent; a field that is not listed is an error.</p>{operations}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = []
    if "requestBody" in operation:
        parts.append(_body(operation["requestBody"]["content"]["application/json"]["schema"]))
    responses = operation["responses"].items()
    parts.append(_table((f"<code>{status}</code>", escape(each["description"])) for status, each in responses))
    for media_type, content in operation["responses"]["200"]["content"].items():
        if set(content["schema"]) - {"type"}:
            parts.append(_schema(f"schema of the answer, {media_type}", content["schema"]))
    summary = f"<i>{method}</i> <b>{escape(path)}</b> <span>{escape(operation['summary'])}</span>"
    return f"<details><summary>{summary}</summary>{''.join(parts)}</details>"


def _body(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(name)}</code>{' <span>required</span>' if name in required else ''}",
            escape(_type(field)),
            escape(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
        if field.get("description") != NOT_SUPPORTED
    ]
    return _table(rows) + _schema("schema of the body", schema)


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"] if value is not None)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        names = [_type(each) for each in alternatives]
        return " | ".join(name for name in dict.fromkeys(names) if name != "null")
    given = schema.get("type", "any")
    types = [name for name in (given if isinstance(given, list) else [given]) if name != "null" or given == "null"]
    if "minimum" in schema:
        types = [f"{types[0]} in [{schema['minimum']}, {schema['maximum']}]"]
    return " | ".join(types)


def _table(rows: "Iterator[tuple[str, ...]] | list[tuple[str, ...]]") -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def _schema(title: str, schema: dict[str, Any]) -> str:
    text = escape(json.dumps(schema, indent=1))
    return f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>"
