"""Which parts of JSON Schema are enforced. Everything else is refused with a pointer to it, not ignored in silence.

A keyword is enforced, an annotation (which says nothing about what is valid), or refused. llguidance by itself takes
keywords that it does not know for annotations, and so would take a misspelt one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import InvalidRequestError

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


class SubSchema(NamedTuple):
    pointer: str
    schema: dict[str, Any]
    depth: int


def prepare_schema(schema: dict[str, Any], param: str, max_depth: int = 64) -> dict[str, Any]:
    """The schema without what says nothing.

    Raises `InvalidRequestError` with a JSON pointer to what is not supported.
    """
    try:
        return _Preparation(schema, param, max_depth).prepared()
    except _RefusedError as error:
        raise InvalidRequestError(f"{param}: {error.pointer or '/'}: {error.why}.", param, "unsupported") from error


def sub_schemas(schema: dict[str, Any]) -> Iterator[SubSchema]:
    """The schema and all in it, those inside before those around them."""
    found: list[SubSchema] = []
    waiting = [SubSchema("", schema, 0)]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for pointer, child in _children(one):
            if isinstance(child, dict):
                waiting.append(SubSchema(pointer, child, one.depth + 1))
    return iter(found[::-1])


def _children(parent: SubSchema) -> Iterator[tuple[str, Any]]:
    for keyword, value in parent.schema.items():
        here = f"{parent.pointer}/{_escaped(keyword)}"
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            yield from ((f"{here}/{_escaped(name)}", child) for name, child in value.items())
        elif (keyword in _SCHEMAS or keyword == "items") and isinstance(value, list):
            yield from ((f"{here}/{index}", child) for index, child in enumerate(value))
        elif keyword in _SCHEMA:
            yield here, value


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


class _RefusedError(Exception):
    def __init__(self, pointer: str, why: str) -> None:
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
        self._references: list[tuple[str, str]] = []

    def prepared(self) -> dict[str, Any]:
        root: dict[str, Any] = {}
        waiting: list[tuple[SubSchema, dict[str, Any]]] = [(SubSchema("", self._schema, 0), root)]
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
            pointer = f"{source.pointer}/{_escaped(keyword)}"
            if keyword in _REFUSED:
                if not any(value == neutral and type(value) is type(neutral) for neutral in _REFUSED[keyword]):
                    raise _RefusedError(pointer, f"{keyword!r} is not supported{_INSTEAD.get(keyword, '')}")
            elif keyword not in _KNOWN and not keyword.startswith("x-"):
                near = difflib.get_close_matches(keyword[:_SHOWN_CHARS], sorted(_KNOWN), n=1)
                hint = f" (is it {near[0]!r}?)" if near else ""
                raise _RefusedError(
                    pointer[:_SHOWN_CHARS], f"{keyword[:80]!r} is not a known keyword{hint}".rstrip("?")
                )
        self._check_values(source)

    def _check_values(self, source: SubSchema) -> None:
        schema, at = source.schema, source.pointer
        kinds = schema.get("type", "string")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds or any(kind not in TYPES for kind in kinds):
            raise _RefusedError(f"{at}/type", f"must be of {', '.join(TYPES)}; got {kinds!r:.80}")
        kind = schema.get("format")
        if kind is not None and "string" in kinds and kind not in FORMATS:
            raise _RefusedError(f"{at}/format", f"{kind!r:.80} is not enforced; those that are: {', '.join(FORMATS)}")
        required, least = schema.get("required", []), schema.get("minProperties", 0)
        if isinstance(required, list) and isinstance(least, int) and least - len(required) > 1:
            raise _RefusedError(
                f"{at}/minProperties",
                f"{least} is not enforced where only {len(required)} are required: two others could have the same name",
            )
        if "$ref" in schema:
            self._references.append((f"{at}/$ref", schema["$ref"]))
        if isinstance(schema.get("$anchor"), str):
            self._anchors.add(schema["$anchor"])

    def _copy(self, source: SubSchema, target: dict[str, Any], waiting: list[tuple[SubSchema, dict[str, Any]]]) -> None:
        """Fill `target`; the schemas in it wait for their turn."""

        def child(value: Any, *path: str) -> Any:
            pointer = source.pointer + "".join(f"/{_escaped(part)}" for part in path)
            if isinstance(value, bool):
                return value
            if not isinstance(value, dict):
                raise _RefusedError(pointer, f"must be a schema, got {value!r:.80}")
            copied: dict[str, Any] = {}
            waiting.append((SubSchema(pointer, value, source.depth + 1), copied))
            return copied

        for keyword, value in source.schema.items():
            if keyword in _SCHEMA_MAPS:
                if not isinstance(value, dict):
                    raise _RefusedError(f"{source.pointer}/{_escaped(keyword)}", "must be an object of schemas")
                target[keyword] = {name: child(each, keyword, name) for name, each in value.items()}
            elif keyword in _SCHEMAS or (keyword == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise _RefusedError(f"{source.pointer}/{keyword}", "must be a list of schemas")
                target[keyword] = [child(each, keyword, str(index)) for index, each in enumerate(value)]
            elif keyword in _SCHEMA:
                target[keyword] = child(value, keyword)
            elif keyword in _ASSERTIONS and not (keyword == "format" and _says_nothing(source.schema)):
                target[keyword] = value

    def _check_reference(self, pointer: str, name: Any) -> None:
        if not isinstance(name, str) or not name.startswith("#"):
            raise _RefusedError(pointer, f"only references inside of the schema (#...) are supported, got {name!r:.80}")
        if name == "#" or name[1:] in self._anchors:
            return
        target: Any = self._schema
        for part in name[1:].split("/")[1:] if name.startswith("#/") else [None]:
            key = None if part is None else part.replace("%25", "%").replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key is not None and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise _RefusedError(pointer, f"refers to {name!r:.80}, which does not exist")


def _says_nothing(schema: dict[str, Any]) -> bool:
    """Whether a `format` is for numbers (int64, say), of which it is no assertion."""
    kinds = schema.get("type", "string")
    return "string" not in (kinds if isinstance(kinds, list) else [kinds])
