"""How users ask for structured output, in OpenAI's words and in vLLM's, as a `GrammarSpec`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import GrammarConfig
from ..errors import InvalidRequestError
from .spec import GrammarSpec

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams

MAX_CHOICES = 10_000
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must look like: exactly one of these, as in vLLM.

    `json` is a JSON schema (an object, or its text), `regex` an expression that the whole answer matches, `choice` the
    texts to choose from, `grammar` a GBNF or Lark grammar, `json_object` True any JSON object. Raises
    `InvalidRequestError`, naming the field.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        self.spec()

    def spec(self) -> GrammarSpec:
        values = {kind: getattr(self, kind) for kind in _KINDS}
        values["json_object"] = self.json_object or None  # False asks for nothing
        given = [kind for kind, value in values.items() if value is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs: must hold exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}.",
                "structured_outputs",
            )
        param = f"structured_outputs.{given[0]}"
        if self.json is not None:
            return schema_spec(self.json, param)
        if self.choice is not None:
            return choice_spec(self.choice, param)
        if self.json_object:
            return GrammarSpec(kind="json_object", param=param)
        kind, source = ("regex", self.regex) if self.regex is not None else ("ebnf", self.grammar)
        if not isinstance(source, str) or not source:
            raise InvalidRequestError(f"{param}: must be a text that is not empty, got {source!r:.80}.", param)
        return GrammarSpec(kind="regex" if kind == "regex" else "ebnf", source=source, param=param)


def as_structured_outputs(fields: dict[str, Any]) -> StructuredOutputsParams:
    """Raises `InvalidRequestError`."""
    for name in fields:
        if name not in _KINDS:
            param = f"structured_outputs.{name}"
            raise InvalidRequestError(f"{param}: is not a known field; there are {', '.join(_KINDS)}.", param)
    return StructuredOutputsParams(**fields)


def schema_spec(schema: object, param: str) -> GrammarSpec:
    """Of a JSON schema, or of its text. Raises `InvalidRequestError`."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{param}: is not JSON: {error}.", param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param}: must be a JSON schema, which is an object; got {schema!r:.80}.", param)
    try:
        source = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: is not a JSON schema: {error}.", param) from error
    return GrammarSpec(kind="json_schema", source=source, param=param)


def choice_spec(choices: Sequence[str], param: str) -> GrammarSpec:
    """Of the texts to choose from. Raises `InvalidRequestError`."""
    good = isinstance(choices, list | tuple) and all(isinstance(choice, str) and choice for choice in choices)
    if not good or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"{param}: must be a list of 1 to {MAX_CHOICES} texts, none of them empty; got {choices!r:.80}.", param
        )
    return GrammarSpec(kind="choice", source=json.dumps(list(choices), ensure_ascii=False), param=param)


def check_other_fields(spec: GrammarSpec, params: SamplingParams) -> None:
    """Refuse what could leave no token where the grammar needs one. Raises `InvalidRequestError`."""
    if params.max_tokens == 0:
        raise InvalidRequestError("max_tokens: 0 leaves no room for an answer that a grammar asks for.", "max_tokens")
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(params, name) or getattr(params, f"{name}_token_ids", ()):
            raise InvalidRequestError(f"{name}: does not work together with {spec.param}.", name)
    if params.min_tokens and params.stop_token_ids:
        raise InvalidRequestError(
            f"min_tokens: does not work together with {spec.param} and stop_token_ids, as it forbids those.",
            "min_tokens",
        )


def check_size(spec: GrammarSpec, limits: GrammarConfig) -> None:
    """Refuse a source that is too large to be read. Raises `InvalidRequestError`."""
    num_bytes = len(spec.source.encode(errors="surrogatepass"))
    if num_bytes > limits.max_source_bytes:
        raise InvalidRequestError(
            f"{spec.param}: the {spec.kind.replace('_', ' ')} has {num_bytes} bytes, at most "
            f"{limits.max_source_bytes} are allowed.",
            spec.param,
        )
