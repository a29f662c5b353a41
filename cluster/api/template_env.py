"""Chat templates: compiled in a sandbox with what `transformers` gives them, and what their syntax tree tells.

Imports nothing but jinja, so that a process of its own for templates of strangers starts at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ContentFormat = Literal["string", "parts"]


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template, the names that it reads, and how it wants the content of messages."""

    template: jinja2.Template
    names: frozenset[str]
    content_format: ContentFormat
    takes_strings: bool  # it asks whether a content is a string
    shows_calls: bool  # it writes the calls of earlier answers


@lru_cache(maxsize=32)
def compile_template(source: str) -> CompiledTemplate:
    """Raises `jinja2.TemplateError`, and whatever else a hostile source can make of a compiler."""
    environment = _environment()
    tree = environment.parse(source)
    names = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    iterated, tested = _uses_of_content(tree)
    content_format: ContentFormat = "parts" if iterated else "string"
    template = environment.from_string(source)
    return CompiledTemplate(template, names, content_format, tested, "tool_calls" in source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _uses_of_content(tree: nodes.Template) -> tuple[bool, bool]:
    """Whether a message's content is iterated over, and whether it is asked to be a string.

    A content is `x.content`, `x['content']`, or a name that stands for one: by `set`, or as a macro's argument.
    """
    names = _names_of_content(tree)
    iterated = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tested = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return iterated, tested


def _names_of_content(tree: nodes.Template) -> set[str]:
    names: set[str] = set()
    macros = {macro.name: [argument.name for argument in macro.args] for macro in tree.find_all(nodes.Macro)}
    while True:
        found: set[str] = set()
        for node in tree.find_all(nodes.Assign):
            if isinstance(node.target, nodes.Name) and _is_content(node.node, names):
                found.add(node.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name]
                found.update(
                    name for name, value in zip(parameters, call.args, strict=False) if _is_content(value, names)
                )
        if found <= names:
            return names
        names |= found


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(name=("default" | "list" | "selectattr" | "rejectattr"), node=inner):
            return _is_content(inner, names)
        case _:
            return False
