"""What of JSON Schema is enforced, and where the rest is found."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from grammar_helpers import compiler, schema_spec, shared_compiler
from json_schemas import SCHEMAS
from llguidance import LLMatcher

from quire.cluster.api.answer_grammar import answer_grammar
from quire.cluster.api.chat_reading import Reading
from quire.cluster.api.tools.lark import Lark
from quire.cluster.api.tools.tool_set import Function
from quire.engine.config import GrammarConfig
from quire.engine.errors import InvalidRequestError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.examples import example
from quire.engine.grammar.json_schema import prepare_schema, sub_schemas


def inside(schema: Any) -> dict[str, Any]:
    """A schema with another one in it, at /properties/a~1b/items."""
    return {"type": "object", "properties": {"a/b": {"type": "array", "items": schema}}}


@pytest.mark.parametrize(
    ("schema", "pointer", "why"),
    [
        ({"not": {}}, "/not", "'not' is not supported"),
        ({"if": {}, "then": {}}, "/if", "'if' is not supported"),
        ({"contains": {}}, "/contains", "'contains' is not supported"),
        ({"uniqueItems": True}, "/uniqueItems", "'uniqueItems' is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired", "'dependentRequired' is not supported"),
        ({"propertyNames": {"maxLength": 3}}, "/propertyNames", "'propertyNames' is not supported"),
        ({"unevaluatedProperties": False}, "/unevaluatedProperties", "'unevaluatedProperties' is not supported"),
        ({"nullable": True}, "/nullable", "'nullable' is not supported (use anyOf with {'type': 'null'})"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance", "'x-guidance' is not supported"),
        ({"minlength": 3}, "/minlength", "'minlength' is not a known keyword (is it 'minLength'?)"),
        ({"format": "iri"}, "/format", "'iri' is not enforced; those that are: "),
        ({"type": "text"}, "/type", "must be of array, boolean, integer, null, number, object, string; got ['text']"),
        ({"$ref": "https://example.com/x"}, "/$ref", "only references inside of the schema (#...) are supported, got "),
        ({"$ref": "#/$defs/x"}, "/$ref", "refers to '#/$defs/x', which does not exist"),
        ({"properties": []}, "/properties", "must be an object of schemas"),
        ({"anyOf": {}}, "/anyOf", "must be a list of schemas"),
        ({"anyOf": [3]}, "/anyOf/0", "must be a schema, got 3"),
        ({"type": "object", "required": 5}, "/required", "must be a list of texts, got 5"),
        ({"required": ["a", 3]}, "/required", "must be a list of texts, got ['a', 3]"),
        ({"enum": []}, "/enum", "must be a list that is not empty, got []"),
        ({"minLength": True}, "/minLength", "must be a whole number that is not negative, got True"),
        ({"maxItems": -1}, "/maxItems", "must be a whole number that is not negative, got -1"),
        ({"minProperties": 10**60}, "/minProperties", "must be a whole number that is not negative, got a very large"),
        ({"multipleOf": 0}, "/multipleOf", "must be a number above 0, got 0"),
        ({"minimum": "1"}, "/minimum", "must be a number, got '1'"),
        ({"pattern": None}, "/pattern", "must be a text, got None"),
        ({"anyOf": [{}], "$ref": "#/anyOf/²"}, "/$ref", "refers to '#/anyOf/²', which does not exist"),
        ({"anyOf": [{}], "$ref": f"#/anyOf/{'9' * 5000}"}, "/$ref", "refers to '#/anyOf/9999"),
        ({"anyOf": [{}], "$ref": "#/anyOf/00"}, "/$ref", "refers to '#/anyOf/00', which does not exist"),
        ({"minProperties": 2}, "/minProperties", "2 is not enforced where only 0 are required"),
    ],
)
@pytest.mark.parametrize("where", ["", "/properties/a~1b/items"])
def test_refused_by_pointer(schema: dict[str, Any], pointer: str, why: str, where: str) -> None:
    spec = schema_spec(inside(schema) if where else schema)
    with pytest.raises(InvalidRequestError) as caught:
        shared_compiler().compile(spec)
    assert caught.value.message.startswith(f"structured_outputs: {where}{pointer}: {why}")
    assert (caught.value.param, caught.value.code) == ("structured_outputs", "unsupported")


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]},
        {"type": "string", "pattern": "^(?=a)b"},
        {"type": "string", "pattern": r"(a)\1"},
    ],
)
def test_what_only_llguidance_refuses_has_a_pointer_too(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        shared_compiler().compile(schema_spec(inside(schema)))
    assert ": the json schema cannot be compiled: /properties/a~1b/items: " in caught.value.message


def test_what_is_refused_is_found_among_many_in_few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has all `$defs` with it, and other grammars wait meanwhile."""
    trials: list[int] = []
    validate = LLMatcher.validate_grammar

    def counted(grammar: str, **options: Any) -> str:
        trials.append(len(grammar))
        return validate(grammar, **options)

    monkeypatch.setattr("quire.engine.grammar.compiler.LLMatcher.validate_grammar", counted)
    properties: dict[str, Any] = {f"p{i}": {"type": "string", "maxLength": i + 1} for i in range(400)}
    properties["p321"] = inside({"type": "string", "pattern": "(?=a)"})
    with pytest.raises(InvalidRequestError, match="cannot be compiled: /properties/p321/properties/a~1b/items: "):
        shared_compiler().compile(schema_spec({"type": "object", "properties": properties}))
    assert 0 < len(trials) <= 32
    trials.clear()
    deep: dict[str, Any] = {"type": "string", "pattern": "(?=a)"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequestError, match="cannot be compiled: /items/items"):
        shared_compiler().compile(schema_spec(deep))
    assert len(trials) <= 32


@pytest.mark.parametrize(
    "schema",
    [
        {
            "title": "A",
            "description": "b",
            "default": 1,
            "examples": [{"not": 1}],
            "deprecated": True,
            "x-mine": {"not": 3},
        },
        {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True, "dependentRequired": {}},
        {"type": "integer", "format": "int64"},
        {"const": {"not": 1}},
        {"properties": {"not": {"type": "string"}, "$ref": {"type": "integer"}}},
    ],
)
def test_what_says_nothing_is_left_out(schema: dict[str, Any]) -> None:
    kept = prepare_schema(schema, "p")
    assert kept == {key: value for key, value in schema.items() if key in ("const", "type", "properties")}
    shared_compiler().compile(schema_spec(schema))


def test_a_schema_keeps_all_that_is_enforced() -> None:
    for name, schema in SCHEMAS.items():
        assert prepare_schema(schema, "p") == schema, name


def test_depth_and_size_are_limited() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequestError, match="schemas may be nested 64 deep"):
        shared_compiler().compile(schema_spec(deep))
    with pytest.raises(InvalidRequestError, match="nested 3 deep"):
        compiler(max_schema_depth=3).compile(schema_spec(inside(inside(inside({})))))
    with pytest.raises(InvalidRequestError, match="at most 100 are allowed"):
        compiler(max_source_bytes=100).compile(GrammarSpec(kind="regex", source="a" * 101))


HOSTILE: dict[str, GrammarSpec] = {
    "references": schema_spec(
        {
            "$defs": {
                **{
                    f"n{i}": {
                        "type": "object",
                        "properties": {name: {"$ref": f"#/$defs/n{i + 1}"} for name in "ab"},
                        "required": ["a", "b"],
                    }
                    for i in range(25)
                },
                "n25": {"type": "integer"},
            },
            "$ref": "#/$defs/n0",
        }
    ),
    "itself": schema_spec({"$ref": "#"}),
    "endless": schema_spec({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "long": schema_spec({"type": "string", "minLength": 100_000}),
    "expression": GrammarSpec(kind="regex", source=".*(x.{15}|y.{16}|z.{17}).*q{500}"),
    "no_end": GrammarSpec(kind="lark", source='start: a\na: "x" a'),
    "nonsense": GrammarSpec(kind="lark", source="start: ((("),
    "gbnf": GrammarSpec(kind="ebnf", source="root ::= ("),
    "gbnf_nested": GrammarSpec(kind="ebnf", source="root ::= " + "(" * 50_000),
    "by_number": GrammarSpec(kind="ebnf", source="start: <[5]>"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_soon(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: "):
        shared_compiler().compile(HOSTILE[name])


def test_names_cannot_be_disguised() -> None:
    """`\\u0069d` is `id`, which has another type."""
    grammar = shared_compiler().compile(schema_spec(SCHEMAS["known_and_other_names"]))

    def allowed(text: str) -> bool:
        state = grammar.symbols.deep_copy()
        return bool(state.consume_tokens(list(text.encode())) and state.is_accepting())

    assert allowed('{"id": 1, "other": true}')
    assert not allowed('{"id": 1, "id": true}')
    assert not allowed('{"id": 1, "\\u0069d": true}')


def test_a_schema_in_a_lark_grammar_is_held_to_the_same() -> None:
    lark = Lark({})
    schema = SCHEMAS["known_and_other_names"]
    body = lark.argument("body", schema, Function("f", schema, strict=True))
    lark.rule("start", f'"<tool>" {body} "</tool>"')
    spec = GrammarSpec(kind="lark", source=lark.source())
    grammar = shared_compiler().compile(spec)
    text = bytes(grammar.shortest.symbols).decode()
    assert json.loads(text.removeprefix("<tool>").removesuffix("</tool>")) == {"id": 0}
    state = grammar.symbols.deep_copy()
    assert not state.consume_tokens(list(b'<tool>{"id": 1, "\\u0069d": true}'))
    with pytest.raises(InvalidRequestError, match=r"tools\.f: /not: "):
        lark.argument("f", {"not": {}}, Function("f", {"not": {}}, strict=True, param="tools.f"))
    with pytest.raises(InvalidRequestError, match=r"response_format: /not: "):
        lark.answer({"not": {}}, "response_format")


def test_long_names_of_many_children_cost_little() -> None:
    """Once the length of a name was paid for every child of it."""
    name = "n" * 100_000
    schema = {"properties": {name: {"anyOf": [{"type": "null"}] * 3000}}}
    tracemalloc.start()
    prepare_schema(schema, "p")
    assert len(list(sub_schemas(schema))) == 3002
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20
    for wrong in (
        {"anyOf": [{"not": {}}]},
        {"type": name},
        {"$ref": name},
        {name: 1},
        {"format": name},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            prepare_schema({"properties": {name: wrong}}, "p")
        assert caught.value.message.startswith("p: /properties/nnn")
        assert len(caught.value.message) < 600


def test_a_gateway_refuses_what_is_too_large_before_it_reads_it() -> None:
    limits = GrammarConfig(max_source_bytes=1000)
    large = {"type": "object", "properties": {"a": {"type": "string", "description": "d" * 900}}}
    many = [GrammarSpec(kind=kind, source="é" * 500 + "a") for kind in ("json_schema", "regex", "ebnf")]
    for spec in many:
        with pytest.raises(InvalidRequestError, match=r"has 1001 bytes, at most 1000 are allowed"):
            answer_grammar(Reading(None), spec, limits)
    for strict in (False, True):  # advice that cannot be read is no advice
        lark = Lark({}, limits)
        lark.argument("a", large, Function("f", large, strict=strict))
        with pytest.raises(InvalidRequestError, match=r"^tools\.f: the JSON schemas .* at most 1000 are allowed"):
            lark.argument("b", large, Function("f", large, strict=strict, param="tools.f"))


def test_inner_schemas_come_first() -> None:
    schema = {"anyOf": [{"items": {"type": "null"}}], "properties": {"x~y": {}}}
    assert [str(part.pointer) for part in sub_schemas(schema)][-1] == ""
    assert {str(part.pointer) for part in sub_schemas(schema)} == {"", "/anyOf/0", "/anyOf/0/items", "/properties/x~0y"}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("ab+c", "abc"),
        ("^x{3}(long|s)$", "xxxs"),
        (r"\d-\s[^a][c-d]", "0- bc"),
        ("(.|\n)*THE END", "THE END"),
        (r"\p{L}", None),
        ("a{1000}", None),
    ],
)
def test_examples(pattern: str, text: str | None) -> None:
    assert example(pattern) == text
