"""Writing grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.config import GrammarConfig
from quire.engine.errors import InvalidRequestError
from quire.engine.grammar.json_schema import JSON_OPTIONS, num_chars_of, prepare_schema

from .tool_set import Function

# White space is as models write it, and not for a model to lose itself in.
_OPTIONS = {
    **{key: value for key, value in JSON_OPTIONS.items() if key != "whitespace_pattern"},
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls: expressions over rules that were added to a `Lark`.

    Text goes before a call up to `trigger`; without one, calls are the whole answer, and `text` matches any answer that
    is none. `body` is what follows the trigger: one call, or several where `parallel` was asked for and `separator` is
    None. With a separator, a trigger and a body may follow it again.
    """

    trigger: str | None
    body: str
    separator: str | None = None
    text: str = ""


class Lark:
    """Rules of a grammar under construction. `token_ids` are the marks that are tokens of their own.

    All schemas together may be as large as `limits` say, as they come into one grammar.
    """

    def __init__(self, token_ids: Mapping[str, int], limits: GrammarConfig | None = None) -> None:
        self._token_ids = token_ids
        self._limits = limits or GrammarConfig()
        self._num_schema_chars = 0
        self._rules: list[str] = []

    def rule(self, name: str, body: str) -> str:
        """Add a rule; get its name. Names of terminals are in capitals."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def answer(self, schema: dict[str, Any], param: str) -> str:
        """A rule for an answer in JSON. Raises `InvalidRequestError`."""
        self._count(schema, param)
        return self._json("answer", prepare_schema(schema, param, self._limits.max_schema_depth), JSON_OPTIONS)

    def argument(self, name: str, schema: dict[str, Any] | None, function: Function) -> str:
        """A rule for JSON that follows a schema of a function; any object where there is none.

        Raises `InvalidRequestError` where it has to be followed and cannot be, and where it is too large to be read.
        """
        self._count(schema, function.param)
        try:
            prepared = _ANY_OBJECT
            if schema is not None:
                prepared = prepare_schema(schema, function.param, self._limits.max_schema_depth)
        except InvalidRequestError:
            if function.strict:
                raise
            prepared = {} if schema is not function.parameters else _ANY_OBJECT
        return self._json(name, prepared, _OPTIONS)

    def _count(self, schema: dict[str, Any] | None, param: str) -> None:
        """Refuse what the engine would refuse too, before it costs anything here."""
        self._num_schema_chars += num_chars_of(schema, param)
        limit = self._limits.max_source_bytes
        if self._num_schema_chars > limit:
            raise InvalidRequestError(
                f"{param}: the JSON schemas of the answer have {self._num_schema_chars} characters up to here, with "
                f"what they share counted for each that is written by itself; at most {limit} are allowed.",
                param,
            )

    def _json(self, name: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
        return self.rule(name, f"%json {_without_ids(text)}")

    def is_token(self, mark: str) -> bool:
        return mark in self._token_ids

    def mark(self, mark: str) -> str:
        """An expression for a mark: its token, or its text."""
        if mark not in self._token_ids:
            return quoted(mark)
        return mark if mark.startswith("<") and mark.endswith(">") else f"<[{self._token_ids[mark]}]>"

    def text_until(self, name: str, mark: str) -> str:
        """A rule for any text up to a mark, with it."""
        if self.is_token(mark):
            return self.rule(name, f"/(.|\\n)*/ {self.mark(mark)}")
        return self.rule(f"{name}[lazy]", f"/(.|\\n)*/ {quoted(mark)}")

    def source(self) -> str:
        """The grammar. Schemas come last: the texts that lead to its end are looked for from the top."""
        return "\n".join(sorted(self._rules, key=lambda rule: ": %json " in rule)) + "\n"


def quoted(text: str) -> str:
    """A text as a literal."""
    return _without_ids(json.dumps(text, ensure_ascii=False))


def _without_ids(text: str) -> str:
    """JSON in which nothing looks like a token's id in Lark, `<[5]>`."""
    return text.replace("<[", "\\u003c[")


def object_rule(lark: Lark, index: int, function: Function, key: str) -> str:
    """A rule for `{"name": "f", "arguments": {...}}`, where `key` is the word for the arguments."""
    arguments = lark.argument(f"arguments_{index}", function.parameters, function)
    head = quoted(f'{{"name": {quoted(function.name)}, "{key}": ')
    return lark.rule(f"object_{index}", f'{head} {arguments} "}}"')


def joined(lark: Lark, prefix: str, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """A rule for a list of items in order, of which those marked False may be missing."""
    between = f"{quoted(separator)} " if separator else ""
    after, alone = '""', '""'  # what is left, where something stands before it and where nothing does
    for i in range(len(items) - 1, -1, -1):
        item, needed = items[i]
        behind = lark.rule(f"{prefix}_after_{i}", after)
        after = f"{between}{item} {behind}" if needed else f"({between}{item})? {behind}"
        alone = f"{item} {behind}" if needed else f"{item} {behind} | {lark.rule(f'{prefix}_without_{i}', alone)}"
    return lark.rule(prefix, alone)


def required_calls(calls: CallGrammar, lark: Lark, *, parallel: bool) -> str:
    """An expression for calls and nothing else."""
    one = calls.body if calls.trigger is None else f"{lark.mark(calls.trigger)} {calls.body}"
    if calls.separator is None or not parallel:
        return one
    return f"{one} ({quoted(calls.separator)} {one})*" if calls.separator else f"({one})+"


def possible_calls(calls: CallGrammar, lark: Lark, *, parallel: bool) -> str:
    """An expression for text in which calls may be: none of them is wrong."""
    text = lark.rule("TEXT", "/(.|\\n)+/")
    if calls.trigger is None:
        return f"({lark.rule('OTHER', calls.text)} | {calls.body})?"
    end = lark.rule("END_SPACE", "/[ \\n]+/")
    if lark.is_token(calls.trigger):
        one = f"{lark.mark(calls.trigger)} {calls.body}"
        return f"{text}? ({one} {text}?)*" if parallel else f"{text}? ({one} {end}?)?"
    lark.rule("head[lazy]", f"/(.|\\n)*/ {quoted(calls.trigger)}")
    return f"(head {calls.body})* {text}?" if parallel else f"head {calls.body} {end}? | {text}?"
