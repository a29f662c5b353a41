"""/docs: the OpenAPI document as a page for people. It loads nothing, so it works where there is no other network."""

from __future__ import annotations

from html import escape
from typing import Any

Schema = dict[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { font: 600 1rem ui-monospace, monospace; margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem }
table { border-collapse: collapse } td { padding: .1rem 1.5rem .1rem 0; vertical-align: top }
code { font-family: ui-monospace, monospace }
"""


def render(document: Schema) -> str:
    """HTML: every operation with what it takes, what it answers, and how it fails."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [
        _operation(f"{method.upper()} {path}", operation, document["components"]["schemas"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{"".join(operations)}'
    )


def _operation(name: str, operation: Schema, schemas: dict[str, Schema]) -> str:
    parts = [f"<h2>{escape(name)}</h2><p>{escape(operation['summary'])}</p>"]
    body = operation.get("requestBody")
    if body is not None:
        parts += [_fields(schemas[name]) for name in _names(body["content"]["application/json"]["schema"])]
    answers = [
        f"<tr><td>{status}<td>{escape(response['description'])}<td>{escape(', '.join(response['content']))}"
        for status, response in operation["responses"].items()
    ]
    return "".join(parts) + f"<table>{''.join(answers)}</table>"


def _names(schema: Schema) -> list[str]:
    """The schemas that a body may follow."""
    return [part["$ref"].rpartition("/")[2] for part in schema.get("anyOf", [schema])]


def _fields(schema: Schema) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{'required' if name in required else ''}<td>{escape(_kind(field))}"
        for name, field in schema["properties"].items()
    ]
    return f"<p><b>{escape(schema['title'])}</b></p><table>{''.join(rows)}</table>"


def _kind(schema: Schema) -> str:
    """What a field takes, in a few words. Null, which means that it is not given, goes without saying."""
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return " or ".join(dict.fromkeys(_one_kind(part) for part in parts)) + _told(schema)


def _one_kind(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"] if value is not None) or "nothing"
    kind = str(schema.get("type", "anything"))
    limits = [
        f"{sign} {schema[bound]}"
        for bound, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("maxItems", "at most"))
        if bound in schema
    ]
    return " ".join([kind, *limits]) + _told(schema)


def _told(schema: Schema) -> str:
    return f". {schema['description']}" if "description" in schema else ""
