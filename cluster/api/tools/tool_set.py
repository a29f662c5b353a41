"""The functions that an answer may call."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Function:
    """One function. `parameters` is the JSON schema of its arguments; None: any object. `param` is where it was given.

    `strict`: the schema must be followed. Otherwise it is advice, which grammars follow where they can.
    """

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
    param: str = "tools"


def parameters_of(function: Function) -> list[tuple[str, dict[str, Any], bool]]:
    """The arguments that a function's schema names: name, schema, and whether it is required.

    Each schema has the definitions of the whole, which it may refer to. Arguments that are not named are left out.
    """
    whole = function.parameters or {}
    shared: dict[str, Any] = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    properties, required = whole.get("properties"), whole.get("required")
    if not isinstance(properties, dict):
        return []
    needed = required if isinstance(required, list) else []
    return [
        (name, {**shared, **(schema if isinstance(schema, dict) else {})}, name in needed)
        for name, schema in properties.items()
    ]


@dataclass(frozen=True, slots=True)
class ToolSet(Container[str]):
    """The functions by name, and how they may be called.

    `choice`: "auto" leaves it to the model, "required" wants a call. `only` is the one function that was asked for.
    """

    functions: Mapping[str, Function]
    choice: Literal["auto", "required"] = "auto"
    only: str | None = None
    parallel: bool = True  # more than one call may be made

    def __contains__(self, name: object) -> bool:
        return name in self.functions

    def properties(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's arguments by name, where there are any."""
        function = self.functions.get(name)
        properties = (function.parameters or {}).get("properties") if function else None
        return properties if isinstance(properties, dict) else {}

    @property
    def callable(self) -> list[Function]:
        """Those that may be called, in the order in which they were given."""
        return [function for name, function in self.functions.items() if self.only in (None, name)]
