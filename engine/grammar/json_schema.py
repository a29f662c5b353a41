"""Which parts of JSON Schema are enforced. Everything else is refused with a pointer to it, not ignored in silence.

A keyword is enforced, an annotation (which says nothing about what is valid), or refused. llguidance by itself takes
keywords that it does not know for annotations, and so would take a misspelt one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import InvalidRequestError
from .schema_values import shown, what_it_must_be

_SCHEMA = frozenset(["additionalItems", "additionalProperties", "items"])  # its value is a schema
_SCHEMAS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])  # a list of them
_SCHEMA_MAPS = frozenset(["$defs", "definitions", "patternProperties", "properties"])  # by name
_ASSERTIONS = frozenset(
    [
        "$anchor",
        "$id",
        "$ref",
        "$schema",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "id",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
    ]
)
_ANNOTATIONS = frozenset(
    [
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    ]
)
# Keywords that are not enforced, with the values that say nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "$dynamicAnchor": (),
    "$dynamicRef": (),
    "$recursiveAnchor": (),
    "$recursiveRef": (),
    "$vocabulary": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": (),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (),
    "nullable": (False,),
    "propertyNames": (True,),
    "then": (),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
    "x-guidance": (),
}
_KNOWN = _SCHEMA | _SCHEMAS | _SCHEMA_MAPS | _ASSERTIONS | _ANNOTATIONS
_INSTEAD = {"nullable": " (use anyOf with {'type': 'null'})"}
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

# Of llguidance. A name written with \u could be one that the schema knows under other letters; and a model that has
# lost its way would go on with white space for ever.
JSON_OPTIONS = {"lenient": False, "json_allowed_escapes": 'nrbtf\\"', "whitespace_pattern": r"[ \t\r\n]{1,40}"}

_SHOWN_CHARS = 200
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # of a list, in a reference


class Pointer:
    """Where something stands in a schema. Linked, as a text for each part would hold every name once per child."""

    __slots__ = ("_parent", "_part")

    def __init__(self, parent: Pointer | None = None, part: str = "") -> None:
        self._parent = parent
        self._part = part

    def __truediv__(self, part: str) -> Pointer:
        return Pointer(self, part)

    def __str__(self) -> str:
        """As JSON has it, cut for messages."""
        parts: list[str] = []
        at = self
        while at._parent is not None:
            parts.append(_cut(at._part).replace("~", "~0").replace("/", "~1"))
            at = at._parent
        return _cut("".join(f"/{part}" for part in reversed(parts)))


class SubSchema(NamedTuple):
    pointer: Pointer
    schema: dict[str, Any]
    depth: int


def num_chars_of(schema: Any, param: str) -> int:
    """The size of a schema as text. Raises `InvalidRequestError` where it is none."""
    try:
        return len(json.dumps(schema, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: is not a JSON schema: {str(error)[:_SHOWN_CHARS]}.", param) from error


def prepare_schema(schema: dict[str, Any], param: str, max_depth: int = 64) -> dict[str, Any]:
    """The schema without what says nothing. It costs as much as the schema is large, which callers have bounded.

    Raises `InvalidRequestError` with a JSON pointer to what is not supported.
    """
    try:
        return _Preparation(schema, param, max_depth).prepared()
    except _RefusedError as error:
        raise InvalidRequestError(
            f"{param}: {str(error.pointer) or '/'}: {error.why}.", param, "unsupported"
        ) from error


def sub_schemas(schema: dict[str, Any]) -> Iterator[SubSchema]:
    """The schema and all in it, those inside before those around them."""
    found: list[SubSchema] = []
    waiting = [SubSchema(Pointer(), schema, 0)]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += parts_of(one)
    return iter(found[::-1])


def parts_of(parent: SubSchema) -> list[SubSchema]:
    """The schemas that are directly in it."""
    return [SubSchema(at, child, parent.depth + 1) for at, child in _children(parent) if isinstance(child, dict)]


def _children(parent: SubSchema) -> Iterator[tuple[Pointer, Any]]:
    for keyword, value in parent.schema.items():
        here = parent.pointer / keyword
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            yield from ((here / name, child) for name, child in value.items())
        elif (keyword in _SCHEMAS or keyword == "items") and isinstance(value, list):
            yield from ((here / str(index), child) for index, child in enumerate(value))
        elif keyword in _SCHEMA:
            yield here, value


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class _RefusedError(Exception):
    def __init__(self, pointer: Pointer, why: str) -> None:
        super().__init__(why)
        self.pointer = pointer
        self.why = why


class _Preparation:
    """One schema while it is looked at. Nothing here recurses: a schema may be deep."""

    def __init__(self, schema: dict[str, Any], param: str, max_depth: int) -> None:
        self._schema = schema
        self._param = param
        self._max_depth = max_depth
        self._anchors: set[str] = set()
        self._references: list[tuple[Pointer, Any]] = []

    def prepared(self) -> dict[str, Any]:
        root: dict[str, Any] = {}
        waiting: list[tuple[SubSchema, dict[str, Any]]] = [(SubSchema(Pointer(), self._schema, 0), root)]
        while waiting:
            source, target = waiting.pop()
            if source.depth > self._max_depth:
                raise _RefusedError(source.pointer, f"schemas may be nested {self._max_depth} deep")
            self._check(source)
            self._copy(source, target, waiting)
        for pointer, name in self._references:
            self._check_reference(pointer, name)
        return root

    def _check(self, source: SubSchema) -> None:
        for keyword, value in source.schema.items():
            if keyword in _REFUSED:
                if not any(value == neutral and type(value) is type(neutral) for neutral in _REFUSED[keyword]):
                    why = f"{keyword!r} is not supported{_INSTEAD.get(keyword, '')}"
                    raise _RefusedError(source.pointer / keyword, why)
            elif keyword not in _KNOWN and not keyword.startswith("x-"):
                near = difflib.get_close_matches(keyword[:_SHOWN_CHARS], sorted(_KNOWN), n=1)
                hint = f" (is it {near[0]!r}?)" if near else ""
                raise _RefusedError(source.pointer / keyword, f"{shown(keyword)} is not a known keyword{hint}")
            elif (wanted := what_it_must_be(keyword, value)) is not None:
                raise _RefusedError(source.pointer / keyword, f"must be {wanted}, got {shown(value)}")
        self._check_values(source)

    def _check_values(self, source: SubSchema) -> None:
        schema, at = source.schema, source.pointer
        kinds = schema.get("type", "string")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds or any(kind not in TYPES for kind in kinds):
            raise _RefusedError(at / "type", f"must be of {', '.join(TYPES)}; got {shown(kinds)}")
        kind = schema.get("format")
        if kind is not None and "string" in kinds and kind not in FORMATS:
            raise _RefusedError(at / "format", f"{shown(kind)} is not enforced; those that are: {', '.join(FORMATS)}")
        num_required, least = len(schema.get("required", [])), schema.get("minProperties", 0)
        if least - num_required > 1:
            raise _RefusedError(
                at / "minProperties",
                f"{least} is not enforced where only {num_required} are required: two others could have the same name",
            )
        if "$ref" in schema:
            self._references.append((at / "$ref", schema["$ref"]))
        if "$anchor" in schema:
            self._anchors.add(schema["$anchor"])

    def _copy(self, source: SubSchema, target: dict[str, Any], waiting: list[tuple[SubSchema, dict[str, Any]]]) -> None:
        """Fill `target`; the schemas in it wait for their turn."""

        def child(value: Any, *path: str) -> Any:
            pointer = source.pointer
            for part in path:
                pointer /= part
            if isinstance(value, bool):
                return value
            if not isinstance(value, dict):
                raise _RefusedError(pointer, f"must be a schema, got {shown(value)}")
            copied: dict[str, Any] = {}
            waiting.append((SubSchema(pointer, value, source.depth + 1), copied))
            return copied

        for keyword, value in source.schema.items():
            if keyword in _SCHEMA_MAPS:
                if not isinstance(value, dict):
                    raise _RefusedError(source.pointer / keyword, "must be an object of schemas")
                target[keyword] = {name: child(each, keyword, name) for name, each in value.items()}
            elif keyword in _SCHEMAS or (keyword == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise _RefusedError(source.pointer / keyword, "must be a list of schemas")
                target[keyword] = [child(each, keyword, str(index)) for index, each in enumerate(value)]
            elif keyword in _SCHEMA:
                target[keyword] = child(value, keyword)
            elif keyword in _ASSERTIONS and not (keyword == "format" and _says_nothing(source.schema)):
                target[keyword] = value

    def _check_reference(self, pointer: Pointer, name: Any) -> None:
        if not isinstance(name, str) or not name.startswith("#"):
            raise _RefusedError(
                pointer, f"only references inside of the schema (#...) are supported, got {shown(name)}"
            )
        if name == "#" or name[1:] in self._anchors:
            return
        target: Any = self._schema
        for part in name[1:].split("/")[1:] if name.startswith("#/") else [None]:
            key = None if part is None else part.replace("%25", "%").replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key and _INDEX.fullmatch(key) and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise _RefusedError(pointer, f"refers to {shown(name)}, which does not exist")


def _says_nothing(schema: dict[str, Any]) -> bool:
    """Whether a `format` is for numbers (int64, say), of which it is no assertion."""
    kinds = schema.get("type", "string")
    return "string" not in (kinds if isinstance(kinds, list) else [kinds])
