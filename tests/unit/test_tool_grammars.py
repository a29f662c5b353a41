"""Grammars of tool calls: what they allow, that the parser of their format reads it, and that it can always end."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from quire.cluster.api.answer_grammar import answer_grammar
from quire.cluster.api.chat_reading import Reading
from quire.cluster.api.reasoning import ReasoningMarks
from quire.cluster.api.tools import (
    FORMATS,
    Arguments,
    CallStart,
    Content,
    Function,
    IncrementalParser,
    Reasoning,
    ToolSet,
)
from quire.engine.config import GrammarConfig, ModelConfig
from quire.engine.errors import InvalidRequestError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.compiler import Grammar, LlguidanceCompiler
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

EOS = 2
THINK = ReasoningMarks("<think>", "</think>")
FUNCTIONS = [
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome/x <[5]>"]},
                "days": {"type": "integer"},
                "where": {"$ref": "#/$defs/point"},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        },
    ),
    Function("no_arguments", {"type": "object", "properties": {}, "additionalProperties": False}),
]


class Tokens:
    """A tokenizer, with the marks of all formats as tokens or as text, and a compiler for it."""

    def __init__(self, *, with_marks: bool) -> None:
        info = load_model_info(ModelConfig())
        self.tokenizer = load_tokenizer(info)
        self.backend = self.tokenizer.backend_tokenizer
        if with_marks:
            self.backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>"])
            self.backend.add_tokens([AddedToken(mark) for mark in ("<tool_call>", "</tool_call>", "</think>")])
        marks = [*THINK_MARKS, *(mark for each in FORMATS.values() for mark in each.marks)]
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        self.ids = {mark: self.backend.token_to_id(mark) for mark in marks if mark in added}
        size = info.vocab_size + 16
        self.closing = {i for text, i in self.backend.get_vocab().items() if set(text) <= set('}]")0,')}
        self.compiled: dict[GrammarSpec, Grammar] = {}
        self.compiler = LlguidanceCompiler(lambda: self.tokenizer, size, [EOS], GrammarConfig())

    def compile(self, spec: GrammarSpec) -> Grammar:
        if spec not in self.compiled:
            self.compiled[spec] = self.compiler.compile(spec)
        return self.compiled[spec]

    def allows(self, spec: GrammarSpec, text: str) -> bool:
        matcher = self.compile(spec).tokens.deep_copy()
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


THINK_MARKS = (THINK.start, THINK.end)


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def tokens(request: pytest.FixtureRequest) -> Tokens:
    return Tokens(with_marks=request.param)


def reading(
    tokens: Tokens, name: str, *, think: bool = False, inside: bool = False, functions: Any = FUNCTIONS, **how: Any
) -> Reading:
    tools = ToolSet({function.name: function for function in functions}, **how)
    marks = THINK if think else None
    return Reading(None, tools=tools, tool_format=FORMATS[name], marks=marks, inside=inside, token_ids=tokens.ids)


def grammar(tokens: Tokens, name: str, wanted: GrammarSpec | None = None, **how: Any) -> GrammarSpec:
    spec = answer_grammar(reading(tokens, name, **how), wanted)
    assert spec is not None
    return spec


def calls_in(name: str, text: str) -> list[tuple[str, str]]:
    """The calls that the format's parser finds, and nothing but calls."""
    parser = IncrementalParser(FORMATS[name].parser(ToolSet({each.name: each for each in FUNCTIONS})))
    calls: list[tuple[str, str]] = []
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case CallStart(function):
                calls.append((function, ""))
            case Arguments(piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
            case Reasoning() | Content() if name == "harmony":  # a thought, and what is said before a call
                continue
            case _:
                raise AssertionError(f"{event} in {text!r}")
    return calls


def random_answer(tokens: Tokens, spec: GrammarSpec, seed: int, num_tokens: int = 150) -> str | None:
    """A text that the grammar allows, drawn token by token; None when it did not end in time."""
    matcher = tokens.compile(spec).tokens.deep_copy()
    rng = random.Random(seed)
    ids: list[int] = []
    for _ in range(num_tokens):
        mask = matcher.compute_bitmask()
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
        if EOS in allowed:
            return str(tokens.backend.decode(ids, skip_special_tokens=False))
        closing = [i for i in allowed if i in tokens.closing]
        ids.append(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
        assert matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", [{}, {"parallel": False}, {"only": "get_weather", "parallel": False}])
def test_what_the_grammar_makes_the_parser_reads(tokens: Tokens, name: str, how: dict[str, Any]) -> None:
    spec = grammar(tokens, name, choice="required", **how)
    num_calls = []
    for seed in range(3):
        text = random_answer(tokens, spec, seed)
        if text is None:
            continue
        calls = calls_in(name, text)
        num_calls.append(len(calls))
        for function, arguments in calls:
            value = json.loads(arguments)
            if function == "get_weather":
                assert value["city"] in ("Paris", "Rome/x <[5]>")
                assert value.keys() <= {"city", "days", "where"}
                assert isinstance(value.get("days", 0), int)
                assert isinstance(value.get("where", {"x": 1})["x"], int | float)
            else:
                assert (function, value) == ("no_arguments", {})
                assert "only" not in how
    assert num_calls
    assert min(num_calls) >= 1
    if how:
        assert max(num_calls) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_the_shortest_answer_is_a_call(tokens: Tokens, name: str) -> None:
    """Which answers are steered to when their tokens run out."""
    compiled = tokens.compile(grammar(tokens, name, choice="required"))
    ids = []
    rest: Any = compiled.shortest
    while rest:
        ids.append(rest.first_token())
        rest = rest.after(compiled.vocabulary.symbols_of(ids[-1]))
    assert calls_in(name, tokens.backend.decode(ids, skip_special_tokens=False)) == [("no_arguments", "{}")]


ONE = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "pythonic": '[get_weather(city="Paris")]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>",
}
SEPARATOR = {"hermes": "\n", "qwen3_coder": "\n"}


@pytest.mark.parametrize("name", ONE)
def test_auto_leaves_text_alone_and_holds_calls_to_their_schema(tokens: Tokens, name: str) -> None:
    strict = [Function(each.name, each.parameters, strict=True) for each in FUNCTIONS]
    spec = grammar(tokens, name, functions=strict)
    for text in ("", "Hello.\n2 < 3, no?", ONE[name]):
        assert tokens.allows(spec, text), text
    assert not tokens.allows(spec, ONE[name].replace("Paris", "Madrid"))
    assert not tokens.allows(spec, ONE[name].replace("get_weather", "get_time"))
    if name in SEPARATOR:
        assert tokens.allows(spec, f"I look.\n{ONE[name]}\n{ONE[name]}\nDone.")


@pytest.mark.parametrize("name", SEPARATOR)
def test_one_call_where_more_are_not_wanted(tokens: Tokens, name: str) -> None:
    spec = grammar(tokens, name, parallel=False)
    two = ONE[name] + SEPARATOR[name] + ONE[name]
    assert tokens.allows(spec, f"I look. {ONE[name]}\n")
    assert tokens.allows(spec, "No.")
    assert not tokens.allows(spec, two)
    required = grammar(tokens, name, choice="required", parallel=False)
    assert tokens.allows(required, ONE[name])
    assert not tokens.allows(required, two)
    assert not tokens.allows(required, "No.")
    assert tokens.allows(grammar(tokens, name, choice="required"), two)


def test_a_grammar_only_where_something_was_promised(tokens: Tokens) -> None:
    assert answer_grammar(reading(tokens, "hermes"), None) is None
    assert answer_grammar(Reading(None), None) is None
    wanted = GrammarSpec(kind="regex", source="a+")
    assert answer_grammar(Reading(None), wanted) == wanted


SCHEMA = {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"], "additionalProperties": False}
WANTED = [
    (GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA)), '{"y": 1}', '{"y": "1"}'),
    (GrammarSpec(kind="json_object"), '{"a": [1]}', "[1]"),
    (GrammarSpec(kind="regex", source="a/b|c<[5]>"), "a/b", "a"),
    (GrammarSpec(kind="choice", source='["x\\n", "<[5]>"]'), "<[5]>", "x"),
    (GrammarSpec(kind="ebnf", source='root ::= "yes" | no\nno ::= "no"'), "no", "maybe"),
    (GrammarSpec(kind="ebnf", source='start: "yes" | no\nno: "no"'), "no", "maybe"),
]


@pytest.mark.parametrize(("wanted", "good", "bad"), WANTED)
def test_structured_output_begins_after_the_thought(tokens: Tokens, wanted: GrammarSpec, good: str, bad: str) -> None:
    spec = answer_grammar(Reading(None, marks=THINK, inside=True, token_ids=tokens.ids), wanted)
    assert spec is not None
    assert tokens.allows(spec, f"Well, {{}}.\n</think>\n\n{good}")
    assert not tokens.allows(spec, good)
    assert not tokens.allows(spec, f"Well</think>{bad}")
    spec = answer_grammar(Reading(None, marks=THINK, token_ids=tokens.ids), wanted)
    assert spec is not None
    assert tokens.allows(spec, good)
    assert tokens.allows(spec, f"<think>\nWell.</think>{good}")
    assert not tokens.allows(spec, f"<think>Well.{good}")


@pytest.mark.parametrize(("wanted", "good", "bad"), WANTED)
def test_tools_or_a_structured_answer(tokens: Tokens, wanted: GrammarSpec, good: str, bad: str) -> None:
    spec = grammar(tokens, "hermes", wanted)
    for text, fine in ((good, True), (bad, False), (ONE["hermes"], True), ("Text.", False)):
        assert tokens.allows(spec, text) == fine, text
    with pytest.raises(InvalidRequestError, match="structured_outputs: is not allowed together with a tool_choice"):
        grammar(tokens, "hermes", wanted, choice="required")
    with pytest.raises(InvalidRequestError, match="structured_outputs: does not go together with tools for this model"):
        grammar(tokens, "llama3_json", wanted)


def test_required_calls_after_a_thought(tokens: Tokens) -> None:
    spec = grammar(tokens, "hermes", choice="required", think=True, inside=True)
    assert tokens.allows(spec, f"I should call.\n</think>\n\n{ONE['hermes']}")
    assert not tokens.allows(spec, f"{ONE['hermes']}")
    spec = grammar(tokens, "hermes", choice="required", think=True)
    assert tokens.allows(spec, f"<think>\n</think>\n\n{ONE['hermes']}")
    assert tokens.allows(spec, ONE["hermes"])
    assert not tokens.allows(spec, "<think>")


def test_what_a_format_has_no_words_for(tokens: Tokens) -> None:
    odd = Function("f", {"type": "object", "properties": {"my-key": {"type": "string"}}})
    with pytest.raises(InvalidRequestError, match="tools: the argument 'my-key' cannot be written by this model"):
        grammar(tokens, "pythonic", choice="required", functions=[odd])
    held = Function("f", {"type": "object", "properties": {"k": {"type": "string", "pattern": "a"}}}, strict=True)
    with pytest.raises(InvalidRequestError, match="tools: pattern of 'k' cannot be held to"):
        grammar(tokens, "qwen3_coder", functions=[held])
    with pytest.raises(InvalidRequestError, match="names a token by number"):
        answer_grammar(
            Reading(None, marks=THINK, token_ids=tokens.ids), GrammarSpec(kind="ebnf", source="start: <[5]>")
        )


def test_schemas_are_followed_refused_or_advice(tokens: Tokens) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    for name in FORMATS:
        strict = Function("f", odd, strict=True, param="tools[3].function.parameters")
        with pytest.raises(InvalidRequestError, match="/uniqueItems: 'uniqueItems' is not supported") as caught:
            grammar(tokens, name, functions=[strict])
        assert caught.value.param == "tools[3].function.parameters"
        assert grammar(tokens, name, choice="required", functions=[Function("f", odd)])
    wanted = GrammarSpec(kind="json_schema", source=json.dumps(odd), param="response_format")
    with pytest.raises(InvalidRequestError, match="response_format: /properties/x/uniqueItems"):
        grammar(tokens, "hermes", wanted)


def test_functions_without_a_schema_take_any_object(tokens: Tokens) -> None:
    for name in FORMATS:
        if name == "pythonic":
            continue
        spec = grammar(tokens, name, choice="required", functions=[Function("f")])
        assert tokens.compile(spec).shortest
