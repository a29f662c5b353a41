"""What the whole text of a chat answer must look like: the thought, then calls, or an answer of a given form."""

from __future__ import annotations

import json

from llguidance.gbnf_to_lark import any_to_lark

from quire.engine.config import GrammarConfig
from quire.engine.errors import InvalidRequestError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.request_fields import check_size

from .chat_reading import Reading
from .reasoning import ReasoningMarks
from .tools.lark import Lark, possible_calls, quoted, required_calls
from .tools.tool_set import ToolSet


def answer_grammar(
    reading: Reading, wanted: GrammarSpec | None, limits: GrammarConfig | None = None
) -> GrammarSpec | None:
    """The grammar of answers that call tools as they may, and otherwise are as `wanted`; None where all is allowed.

    Raises `InvalidRequestError` for what does not go together, or is over the `limits`.
    """
    limits = limits or GrammarConfig()
    if wanted is not None:
        check_size(wanted, limits)
    lark = Lark(reading.token_ids, limits)
    spec = wanted
    if reading.tools is not None and (wanted is not None or _needs_grammar(reading.tools)):
        start = _calls(reading, lark, wanted)
        param = "tools" if wanted is None else wanted.param
    elif wanted is not None and reading.marks is not None:
        start, param = _answer(lark, wanted), wanted.param
    else:
        return spec
    if reading.marks is not None:
        start = _after_thought(lark, reading.marks, start, inside=reading.inside)
    lark.rule("start", start)
    return GrammarSpec(kind="lark", source=lark.source(), param=param)


def _needs_grammar(tools: ToolSet) -> bool:
    """Whether something was promised that the model would not keep by itself."""
    return tools.choice == "required" or not tools.parallel or any(each.strict for each in tools.callable)


def _calls(reading: Reading, lark: Lark, wanted: GrammarSpec | None) -> str:
    tools, tool_format = reading.tools, reading.tool_format
    assert tools is not None
    assert tool_format is not None
    calls = tool_format.grammar(tools, lark)
    if tools.choice == "required":
        if wanted is not None:
            raise InvalidRequestError(
                f"{wanted.param}: is not allowed together with a tool_choice that leaves no room for it.", wanted.param
            )
        return required_calls(calls, lark, parallel=tools.parallel)
    if wanted is None:
        return possible_calls(calls, lark, parallel=tools.parallel)
    if calls.trigger is None:
        raise InvalidRequestError(
            f"{wanted.param}: does not go together with tools for this model, whose calls nothing tells from other "
            "answers.",
            wanted.param,
        )
    return f"{_answer(lark, wanted)} | {required_calls(calls, lark, parallel=tools.parallel)}"


def _answer(lark: Lark, wanted: GrammarSpec) -> str:
    """A rule for what a grammar of its own describes."""
    match wanted.kind:
        case "json_schema":
            return lark.answer(json.loads(wanted.source), wanted.param)
        case "json_object":
            return lark.answer({"type": "object"}, wanted.param)
        case "regex":
            return lark.rule("ANSWER", f"/{_in_slashes(wanted.source)}/")
        case "choice":
            return lark.rule("ANSWER", " | ".join(quoted(choice) for choice in json.loads(wanted.source)))
        case _:
            if "<[" in wanted.source:
                message = f"{wanted.param}: names a token by number; write special tokens by name, as <|name|>."
                raise InvalidRequestError(message, wanted.param)
            try:
                source = any_to_lark(wanted.source) if wanted.kind == "ebnf" else wanted.source
            except Exception as error:  # it raises anything for a grammar that it cannot read
                message = f"{wanted.param}: the grammar cannot be read: {str(error)[:200]}."
                raise InvalidRequestError(message, wanted.param) from error
            return lark.rule("answer", f"%lark {{\n{source}\n}}")


def _in_slashes(regex: str) -> str:
    """A regular expression as Lark has it between slashes."""
    pieces, escaped = [], False
    for character in f"(?:{regex})":
        pieces.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(pieces).replace("<[", "\\x3c[")  # which would be the id of a token


def _after_thought(lark: Lark, marks: ReasoningMarks, answer: str, *, inside: bool) -> str:
    """The thought is free; the grammar begins after its end."""
    thought = lark.text_until("thought", marks.end)
    space = lark.rule("SPACE", "/[ \\n]{1,4}/")
    rest = lark.rule("rest", answer)
    if inside:
        return f"{thought} {space}? {rest}"
    return f"({lark.mark(marks.start)} {thought} {space}?)? {rest}"
