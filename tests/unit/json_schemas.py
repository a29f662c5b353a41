"""Schemas as people write them, and some that are hard to bring to an end."""

from __future__ import annotations

from typing import Any


def obj(required: str | None = None, /, **properties: Any) -> dict[str, Any]:
    """An object of which all properties are required, or those named."""
    names = list(properties) if required is None else required.split()
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))
TREE = obj(value=INTEGER, left={"anyOf": [{"$ref": "#/$defs/tree"}, NULL]}, right={"$ref": "#/$defs/maybe"})

SCHEMAS: dict[str, dict[str, Any]] = {
    "anything": {},
    "any_object": {"type": "object"},
    "any_array": {"type": "array"},
    "person": obj(name=STRING, age=INTEGER),
    "optional": obj("id", id=INTEGER, note=STRING, tags={"type": "array", "items": STRING}),
    "open_object": {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]},
    "map": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3},
    "nested": obj(a=obj(b=obj(c=obj(d=STRING)))),
    "long_string": obj(text={"type": "string", "minLength": 40, "maxLength": 60}),
    "pattern": obj(zip={"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}),
    "loose_pattern": {"type": "string", "pattern": "ab+c"},
    "email": obj(mail={"type": "string", "format": "email"}),
    "moment": obj(at={"type": "string", "format": "date-time"}, on={"type": "string", "format": "date"}),
    "uuid": obj(id={"type": "string", "format": "uuid"}),
    "addresses": obj(v4={"type": "string", "format": "ipv4"}, host={"type": "string", "format": "hostname"}),
    "enum": obj(colour={"enum": ["extraordinarily colourful", "red", "green"]}, size={"enum": [1, 2.5, None, "XL"]}),
    "const": obj(kind={"const": "the only one"}, version={"const": 3}),
    "ranges": obj(
        percent={"type": "integer", "minimum": 10, "maximum": 99},
        ratio={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        large={"type": "integer", "minimum": 100_000},
    ),
    "multiples": obj(sevens={"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 500}),
    "array": {"type": "array", "items": INTEGER, "minItems": 5, "maxItems": 9},
    "array_of_objects": {"type": "array", "items": obj(k=STRING, v=NUMBER), "minItems": 2},
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER, BOOLEAN], "items": False, "minItems": 3},
    "union": {"anyOf": [obj(name=STRING, address=obj(street=STRING, city=STRING)), INTEGER]},
    "tagged": {
        "oneOf": [
            obj(kind={"const": "circle"}, radius=NUMBER),
            obj(kind={"const": "rectangle"}, width=NUMBER, height=NUMBER, label={"type": "string", "minLength": 12}),
        ]
    },
    "nullable": obj(value={"anyOf": [{"type": "string", "minLength": 30}, NULL]}, more={"type": ["string", "null"]}),
    "all_of": {"allOf": [obj("a", a=INTEGER, b=STRING), {"type": "object", "properties": {"a": {"minimum": 5}}}]},
    "tree": {"$defs": {"tree": TREE, "maybe": {"anyOf": [NULL, {"$ref": "#/$defs/tree"}]}}, "$ref": "#/$defs/tree"},
    "list": {
        "definitions": {"node": obj("item", item=STRING, next={"$ref": "#/definitions/node"})},
        "$ref": "#/definitions/node",
    },
    "unicode": obj(größe={"enum": ["klein ✓", "groß 🎉"]}, 名前=STRING),
    "escapes": obj(**{'quote"d': {"enum": ['a "b" \\ c\n']}, "tab\t": STRING}),
    "prefixed": {"type": "object", "patternProperties": {"^x-": INTEGER}, "additionalProperties": False},
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
        "minItems": 2,
    },
    "known_and_other_names": {
        "type": "object",
        "properties": {"id": INTEGER, "i": STRING},
        "required": ["id"],
        "additionalProperties": BOOLEAN,
    },
    "invoice": obj(
        number={"type": "string", "pattern": "^INV-[0-9]{6}$"},
        lines={"type": "array", "items": obj(name=STRING, price=NUMBER, tax={"enum": [0, 7, 19]}), "minItems": 1},
        paid=BOOLEAN,
        customer=obj("name", name=STRING, vat={"type": "string", "minLength": 9, "maxLength": 9}),
    ),
}
