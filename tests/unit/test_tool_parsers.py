"""Tool calls and thoughts in text: what each format means, and that pieces of a text mean what the whole does."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.api.reasoning import ReasoningMarks, plain, with_reasoning
from quire.cluster.api.tools import (
    FORMATS,
    Arguments,
    CallStart,
    Content,
    Event,
    Function,
    IncrementalParser,
    Parser,
    Reasoning,
    ToolSet,
    detect_format,
)
from quire.cluster.api.tools.reader import Reader, Steps

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"type": "object"},
            "exact": {"type": "boolean"},
        },
    },
)
TOOLS = ToolSet({function.name: function for function in (WEATHER, Function("f"), Function("my-tool.v2"))})
THINK = ReasoningMarks("<think>", "</think>")


def parser_of(name: str) -> Parser:
    return FORMATS[name].parser(TOOLS)


def read(parser: Parser, *pieces: str, hidden: frozenset[str] = frozenset()) -> list[Event]:
    """The events of a text in pieces, neighbours of one kind joined."""
    incremental = IncrementalParser(parser, hidden=hidden)
    events = [event for piece in pieces for event in incremental.push(piece)] + incremental.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if last is not None and type(last) is type(event) and not isinstance(event, CallStart):
            joined[-1] = type(event)(last.text + event.text)  # type: ignore[union-attr]
        else:
            joined.append(event)
    return joined


def call(name: str, arguments: str) -> list[Event]:
    return [CallStart(name), Arguments(arguments)] if arguments else [CallStart(name)]


PARIS = '{"city": "Paris", "days": 3}'
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
NESTED = '{"a": {"b": ["}", "</tool_call>", "\\"]\\\\"]}, "c": "日本 🎉"}'

# Format, text, what it means.
CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", "No tools needed. \n", [Content("No tools needed. \n")]),
    ("hermes", "", []),
    ("hermes", " \n", [Content(" \n")]),
    ("hermes", HERMES_CALL, call("get_weather", PARIS)),
    ("hermes", f"Let me look.\n{HERMES_CALL}\n", [Content("Let me look."), *call("get_weather", PARIS)]),
    ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}", call("get_weather", PARIS) * 2),
    ("hermes", f"{HERMES_CALL}\nDone.", [*call("get_weather", PARIS), Content("\nDone.")]),
    ("hermes", f'<tool_call>{{"name":"f","arguments":{NESTED}}}</tool_call>', call("f", NESTED)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "my-tool.v2", "parameters": {"x": 1}}', call("my-tool.v2", '{"x": 1}')),
    # The other order, arguments in a string, none at all, a number.
    ("hermes", '<tool_call>{"arguments": {"x": "ü"}, "name": "f"}</tool_call>', call("f", '{"x": "ü"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', call("f", '{"x": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}, "id": "7"}</tool_call>', call("f", '{"x": 1}')),
    ("hermes", '<tool_call>{"id": "7", "name": "f", "arguments": {"x": 1}}</tool_call>', call("f", '{"x": 1}')),
    # Calls that lack an end.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', call("f", '{"x": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a', call("f", '{"x": "a')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}\n<tool_call>{"name": "f", "arguments": {}}',
        [*call("f", '{"x": 1}'), *call("f", "{}")],
    ),
    # No calls: everything is content.
    ("hermes", "<tool_call>", [Content("<tool_call>")]),
    ("hermes", "<tool_call", [Content("<tool_call")]),
    ("hermes", "<tool_call> f(1) </tool_call> ok", [Content("<tool_call> f(1) </tool_call> ok")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [Content('<tool_call>{"name": "f"}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "argu', [Content('<tool_call>{"name": "f", "argu')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {\'x\': 1}}</tool_call>',
        [Content('<tool_call>{"name": "f", "arguments": {\'x\': 1}}</tool_call>')],
    ),
    (
        "hermes",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        [Content('<tool_call>{"name": 5, "arguments": {}}</tool_call>')],
    ),
    # JSON that goes wrong in the arguments is passed on as it is.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1, \'y\': 2}}</tool_call>!',
        [*call("f", "{\"x\": 1, 'y': 2}}"), Content("!")],
    ),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', call("get_weather", PARIS)),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', call("get_weather", PARIS)),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {}}',
        [*call("f", '{"x": 1}'), *call("f", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}; and', [*call("f", "{}"), Content("; and")]),
    (
        "llama3_json",
        '{"name": "Bob", "parameters": {"age": 3}} x',
        [Content('{"name": "Bob", "parameters": {"age": 3}} x')],
    ),
    ("llama3_json", '{"age": 3}', [Content('{"age": 3}')]),
    ("llama3_json", 'Use {"name": "f", "parameters": {}}', [Content('Use {"name": "f", "parameters": {}}')]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1', call("f", '{"x": 1')),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', call("get_weather", PARIS)),
    (
        "mistral",
        'Sure.[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "f", "arguments": {}}]',
        [Content("Sure."), *call("f", '{"x": 1}'), *call("f", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", call("get_weather", PARIS)),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{PARIS}[TOOL_CALLS]f{{}}",
        [*call("get_weather", PARIS), *call("f", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] what a day", [Content("[TOOL_CALLS] what a day")]),
    ("mistral", "[TOOL_CALLS][1, 2] three", [Content("[TOOL_CALLS][1, 2] three")]),
    ("mistral", "[1, 2]", [Content("[1, 2]")]),
    (
        "pythonic",
        "[get_weather(city='Paris', days=3), f()]",
        [*call("get_weather", PARIS), *call("f", "{}")],
    ),
    (
        "pythonic",
        '<|python_start|>[f(a=[1, {"b": (2.5, None)}], c=true, d="x)\\"]")]<|python_end|>',
        call("f", '{"a": [1, {"b": [2.5, null]}], "c": true, "d": "x)\\"]"}'),
    ),
    ("pythonic", "[my-tool.v2(x=-1)]", call("my-tool.v2", '{"x": -1}')),
    ("pythonic", "[f(1)]", [Content("[f(1)]")]),
    ("pythonic", "[f(x=1), g(x=2)] then", [*call("f", '{"x": 1}'), Content(", g(x=2)] then")]),
    ("pythonic", "[f(x=open('a'))]", [Content("[f(x=open('a'))]")]),
    ("pythonic", "[f(x=1e999)]", [Content("[f(x=1e999)]")]),
    ("pythonic", "[link](http://x)", [Content("[link](http://x)")]),
    ("pythonic", "[f(x=1", [Content("[f(x=1")]),
    ("pythonic", "Hello [f()]", [Content("Hello [f()]")]),
    (
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis "x"\n\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n'
        "<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=units>\nnull\n</parameter>\n</function>\n</tool_call>",
        [
            Content("I look."),
            *call(
                "get_weather",
                '{"city": "Paris \\"x\\"\\n", "days": 3, "where": {"a": [1]}, "exact": true, "units": null}',
            ),
        ],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", call("f", "{}")),
    ("qwen3_coder", "<function=f><parameter=x>1</parameter></function> ok", [*call("f", '{"x": "1"}'), Content(" ok")]),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather>\n<parameter=city>\nPar",
        call("get_weather", '{"city": "Par'),
    ),
    ("qwen3_coder", "<tool_call>{}</tool_call>", [Content("<tool_call>{}</tool_call>")]),
    ("qwen3_coder", "<function=a b>", [Content("<function=a b>")]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Is it <b>2</b>?\n<|end|><|start|>assistant<|channel|>final<|message|>Yes, 2.",
        [Reasoning("Is it <b>2</b>?\n"), Content("Yes, 2.")],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        [Reasoning("Look."), Content("I look."), *call("get_weather", PARIS)],
    ),
    (
        "harmony",
        f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{PARIS}",
        call("f", PARIS),
    ),
    ("harmony", f" to=functions.f<|channel|>commentary json<|message|>{PARIS}<|call|>", call("f", PARIS)),
    ("harmony", f"<|channel|>commentary to=f <|constrain|>json<|message|>{PARIS}", call("f", PARIS)),
    ("harmony", "<|channel|>commentary to=assistant<|message|>Hi", [Content("Hi")]),
    ("harmony", "<|channel|>final<|message|>analysis", [Content("analysis")]),
    ("harmony", "<|channel|>analysis<|message|>Hm", [Reasoning("Hm")]),
    ("harmony", "<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", [Content("ab")]),
    ("harmony", "<|channel|>ana", []),
    ("harmony", '{"x": "<|channel|>"}', [Content('{"x": "<|channel|>"}')]),
]


def cut(text: str, seed: int) -> list[str]:
    """A text in random pieces, of which the small ones are frequent."""
    rng = random.Random(seed)
    pieces = []
    while text:
        length = rng.choice([1, 1, 2, 3, 5, 8, 40])
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def test_where_thoughts_of_channels_end() -> None:
    """Each is one, and what is said between them is not."""
    parser = IncrementalParser(parser_of("harmony"))
    parser.push("<|channel|>analysis<|message|>a")
    assert parser.thinks
    text = "<|channel|>analysis<|message|>a<|end|>"
    parser.push("<|end|>")
    assert (parser.thinks, parser.thought_end) == (False, len(text))
    parser.push("<|start|>assistant<|channel|>commentary<|message|>b<|end|>")
    assert parser.thought_end == len(text)


@pytest.mark.parametrize(("name", "text", "events"), CASES)
def test_what_a_text_means(name: str, text: str, events: list[Event]) -> None:
    assert read(parser_of(name), text) == events


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", [text for _, text, _ in CASES])
def test_every_format_reads_every_text_alike_in_pieces(name: str, text: str) -> None:
    whole = read(parser_of(name), text)
    assert read(parser_of(name), *text) == whole
    for seed in range(20):
        assert read(parser_of(name), *cut(text, seed)) == whole


@pytest.mark.parametrize("lead", ["x" * 120, "'" + "x" * 120, "\\" * 64, "'\\" * 60, "x" * 127, "'" * 127])
def test_what_is_too_long_for_a_name_is_so_wherever_it_is_cut(lead: str) -> None:
    text = f"[{lead}" + "'x(y<|python_end|>()f(x=1)'<|python_end|> z" * 2
    parser = FORMATS["pythonic"].parser(TOOLS)
    hidden = frozenset(FORMATS["pythonic"].marks)
    whole = read(parser, text, hidden=hidden)
    for size in (1, 2, 3, 50, 130):
        assert read(parser, *(text[i : i + size] for i in range(0, len(text), size)), hidden=hidden) == whole


FRAGMENTS = [
    *[mark for each in FORMATS.values() for mark in each.marks],
    *[
        "<function=f>",
        "<parameter=x>",
        "</parameter>",
        "</function>",
        "<function=",
        "\n",
        " ",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
    ],
    *[
        '{"name": "f", ',
        '"arguments": ',
        '"parameters": ',
        '{"x": 1}',
        "'",
        '"',
        "\\",
        ",",
        ";",
        ":",
        "f",
        "f(x=",
        "null",
    ],
    *['"\\ud800"', '{"name": "\\ud800", ', "'\\ud800'", "1e999", "x=", "NaN", "\\ud83d\\ude00"],
    *["<think>", "</think>", "</thi", "日", "hello", '{"name": "f", "arguments": {"x": "', HERMES_CALL],
]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=400, deadline=None)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14), seed=st.integers(0, 1000), thinks=st.booleans())
def test_garbage_is_read_alike_in_pieces_and_never_fails(
    name: str, fragments: list[str], seed: int, thinks: bool
) -> None:
    text = "".join(fragments)
    parser = with_reasoning(THINK, parser_of(name), inside=thinks)
    whole = read(parser, text)
    assert read(parser, *cut(text, seed)) == whole
    assert read(parser, *text) == whole
    for event in whole:
        "".join(event).encode()  # whatever is in it can be sent


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@settings(max_examples=300, deadline=None)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_nothing_is_lost_of_text_without_calls(name: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    events = read(parser_of(name), text)
    if not any(isinstance(event, CallStart) for event in events):
        assert "".join(event.text for event in events if isinstance(event, Content)) == text


@settings(max_examples=200, deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_any_arguments_arrive_as_they_were_written(arguments: dict[str, object], seed: int) -> None:
    for ensure_ascii in (False, True):
        written = json.dumps(arguments, ensure_ascii=ensure_ascii)
        text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
        assert read(parser_of("hermes"), *cut(text, seed)) == call("f", written)
        text = f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]'
        assert read(parser_of("mistral"), *cut(text, seed)) == call("f", written)
        text = f'{{"name": "f", "parameters": {written}}}'
        assert read(parser_of("llama3_json"), *cut(text, seed)) == call("f", written)


def test_nothing_copies_the_rest_of_a_text() -> None:
    """Else a text of many marks takes the square of its length."""
    reader = Reader()
    reader.push("a <x> b  <y>c")
    whole = reader.text
    heard: list[str] = []
    assert run(reader.until(("<y>", "<x>"), heard.append)) == "<x>"
    reader.put_back("<x>")
    assert reader.take(3) + run(reader.space()) == "<x> "
    assert run(reader.starts_with("b"))
    assert reader.take(1) == "b"
    assert run(reader.until(("<y>",), heard.append)) == "<y>"
    assert (heard, reader.position, len(reader)) == (["a ", "  "], 12, 1)
    assert reader.text is whole
    reader.put_back("<y>")
    reader.push("d")
    assert reader.take(9) == "<y>cd"
    reader.put_back("<y>cd")
    reader.take(5)
    reader.push("e")
    reader.put_back("d")  # after it was forgotten
    assert (reader.take(9), reader.position) == ("de", 15)


def run(steps: Steps[Any]) -> Any:
    """What steps return that need not wait."""
    with pytest.raises(StopIteration) as ended:
        next(steps)
    return ended.value.value


def test_types_that_are_none_say_nothing_of_a_bare_value() -> None:
    """Any schema may come with a request."""
    for kind, value in (
        ([{"x": 1}], '"1"'),
        ([{"x": 1}, "integer"], "1"),
        ({"x": 1}, '"1"'),
        ([["integer"], 5], '"1"'),
    ):
        function = Function("f", {"properties": {"a": {"type": kind}}})
        parser = IncrementalParser(FORMATS["qwen3_coder"].parser(ToolSet({"f": function})))
        text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        events = [*parser.push(text), *parser.finish()]
        assert "".join(event.text for event in events if isinstance(event, Arguments)) == f'{{"a": {value}}}'


def test_arguments_are_passed_on_while_they_are_written() -> None:
    incremental = IncrementalParser(parser_of("hermes"))
    assert incremental.push('<tool_call>{"name": "f", "arguments": {"x"') == []
    assert incremental.push(":") == [CallStart("f"), Arguments('{"x":')]
    assert incremental.push(' "abc') == [Arguments(' "abc')]
    incremental = IncrementalParser(parser_of("qwen3_coder"))
    incremental.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert incremental.push("Pa") == [Arguments("Pa")]


def test_marks_that_users_do_not_see_are_not_text() -> None:
    assert read(parser_of("mistral"), "a[TOOL_CALLS] b", hidden=frozenset(["[TOOL_CALLS]"])) == [Content("a b")]
    assert read(parser_of("hermes"), "<tool_call>x</tool_call>", hidden=frozenset(["<tool_call>", "</tool_call>"])) == [
        Content("x")
    ]


REASONING: list[tuple[str, bool, list[Event]]] = [
    ("<think>\nHm, 2 + 2.\n</think>\n\nIt is 4.", False, [Reasoning("Hm, 2 + 2."), Content("It is 4.")]),
    ("Hm.\n</think>\n\n4", True, [Reasoning("Hm."), Content("4")]),
    ("<think>Hm.</think>4", True, [Reasoning("Hm."), Content("4")]),
    ("<think>never ends \n", False, [Reasoning("never ends")]),
    ("never ends", True, [Reasoning("never ends")]),
    ("\n\n<think>\n\n</think>\n\n4", False, [Content("4")]),
    (" 4 <think>", False, [Content(" 4 <think>")]),
    (f"<think>I call.</think>\n{HERMES_CALL}", False, [Reasoning("I call."), *call("get_weather", PARIS)]),
    (f"<think>{HERMES_CALL}</think>Hi", False, [Reasoning(HERMES_CALL), Content("Hi")]),
    ("", True, []),
]


@pytest.mark.parametrize(("text", "inside", "events"), REASONING)
def test_a_thought_stands_apart(text: str, inside: bool, events: list[Event]) -> None:
    parser = with_reasoning(THINK, parser_of("hermes"), inside=inside)
    assert read(parser, text) == events
    assert read(parser, *text) == events


def test_where_a_thought_ends() -> None:
    incremental = IncrementalParser(with_reasoning(THINK, plain, inside=False))
    incremental.push(" <think>a")
    assert (incremental.thinks, incremental.thought_end) == (True, 0)
    incremental.push("b</think>")
    assert (incremental.thinks, incremental.thought_end) == (False, len(" <think>ab</think>"))
    incremental.push(" c")
    assert incremental.thought_end == len(" <think>ab</think>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder"),
        ("[TOOL_CALLS]{{ calls }}", "mistral"),
        ("{{ 'Environment: ipython' }} {{ '\"parameters\": ' }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "harmony"),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    found = detect_format(template)
    assert (found.name if found else None) == name
