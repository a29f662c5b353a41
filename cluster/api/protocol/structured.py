"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quire.engine.errors import InvalidRequestError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.request_fields import MAX_CHOICES, StructuredOutputsParams, schema_spec

from .fields import StrictModel, at_most, wrong

MAX_NAME_CHARS = 64


def _as_it_is(value: object) -> object:
    """A schema is looked at by whoever compiles it: no model of pydantic's has to know its parts."""
    if not isinstance(value, dict | str | bool):
        raise wrong("must be a JSON schema")
    return value


Schema = Annotated[Any, BeforeValidator(_as_it_is)]
FormatName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[a-zA-Z0-9_-]+$")]


class JsonSchemaFormat(StrictModel):
    """`strict` false asks for the schema as advice; it is enforced all the same."""

    name: FormatName
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> GrammarSpec | None:
        """None for free text. Raises `InvalidRequestError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format.json_schema: is required with type 'json_schema', and allowed with no other.",
                "response_format.json_schema",
            )
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return schema_spec(self.json_schema.schema_, "response_format")
        return None if self.type == "text" else GrammarSpec(kind="json_object", param="response_format")


class StructuredOutputs(StrictModel):
    """vLLM's: exactly one of them."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], at_most(MAX_CHOICES)] | None = None
    grammar_: str | None = Field(None, alias="grammar")
    json_object: bool | None = None

    def grammar(self) -> GrammarSpec:
        """Raises `InvalidRequestError`."""
        return StructuredOutputsParams(
            json=self.json_,
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar_,
            json_object=self.json_object,
        ).spec()


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> GrammarSpec | None:
    """What the two fields ask for together. Raises `InvalidRequestError`."""
    by_format = None if response_format is None else response_format.grammar()
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError(
            "structured_outputs: is not allowed together with response_format.", "structured_outputs"
        )
    return structured_outputs.grammar()
