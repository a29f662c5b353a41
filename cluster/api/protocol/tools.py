"""The tools of a request, and how they may be used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from quire.engine.errors import InvalidRequestError

from ..tools.tool_set import Function, ToolSet
from .fields import StrictModel, wrong

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _function_name(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise wrong("must have 1 to 64 letters, digits, '_', '-' or '.'")
    return value


FunctionName = Annotated[
    str, BeforeValidator(_function_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]


class FunctionDefinition(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition

    def template_tool(self) -> dict[str, Any]:
        """The tool as chat templates read it: those of some models want every key."""
        function = self.function
        parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": parameters,
            },
        }


def _choice(value: object) -> object:
    """A word, or the name of a function out of OpenAI's object."""
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise wrong("must be 'none', 'auto', 'required' or {type: 'function', function: {name: ...}}")
        return value
    if isinstance(value, dict) and value.get("type") == "function" and value.keys() == {"type", "function"}:
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return NamedChoice(name=function["name"])
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "function":
        raise wrong(f"of type {value['type'][:40]!r} is not supported, 'function' is")
    raise wrong("must be 'none', 'auto', 'required' or {type: 'function', function: {name: ...}}")


class NamedChoice(StrictModel):
    name: str


_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice, BeforeValidator(_choice), WithJsonSchema(_CHOICE)
]


def tool_set(tools: Sequence[Tool], choice: str | NamedChoice | None, *, parallel: bool) -> ToolSet | None:
    """What an answer may call; None when it may call nothing. Raises `InvalidRequestError`."""
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in functions:
            param = f"tools[{i}].function.name"
            raise InvalidRequestError(f"{param}: {name!r} was given before; names must differ.", param)
        param = f"tools[{i}].function.parameters"
        functions[name] = Function(name, tool.function.parameters, bool(tool.function.strict), param)
    if isinstance(choice, NamedChoice) and choice.name not in functions:
        known = ", ".join(functions) or "none"
        raise InvalidRequestError(
            f"tool_choice: there is no tool {choice.name[:80]!r} in tools; given: {known[:200]}.", "tool_choice"
        )
    if choice == "required" and not functions:
        raise InvalidRequestError("tool_choice: 'required' is allowed only with tools.", "tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        return ToolSet(functions, "required", choice.name, parallel=False)
    return ToolSet(functions, "required" if choice == "required" else "auto", parallel=parallel)
