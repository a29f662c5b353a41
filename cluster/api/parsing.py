"""From the bytes of a body to a validated request, or to an error that names the field and what it allows.

Every field of OpenAI's and vLLM's schemas works, is refused by name, or is harmless and accepted; none is ignored
in silence. The harmless ones, which change nothing about the answer, are in `HARMLESS`.
"""

from __future__ import annotations

import difflib
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from quire.engine.errors import InvalidRequestError

T = TypeVar("T", bound=BaseModel)

# Accepted with any value: labels for the service's own bookkeeping, which Quire does not keep.
HARMLESS = frozenset(
    [
        "user",
        "metadata",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    ]
)

# Known fields that do not work yet, each with the values (besides null) that ask for what happens anyway.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "deadline_ms": (),
    "documents": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

_SHOWN_CHARS = 80

_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse_request(schema: type[T], body: bytes) -> T:
    """Validate a body against a request model. Raises `InvalidRequestError`."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(data, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {shown(data)}.")
    try:
        return schema.model_validate(_known_fields(schema, data))
    except ValidationError as error:
        raise _as_request_error(schema, error) from error


def shown(value: object) -> str:
    """A value as an error message repeats it, short, also in the time that it takes."""
    text = repr(_beginning(value, depth=4))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _beginning(value: object, depth: int) -> object:
    """As much of a JSON value as could be shown."""
    match value:
        case str():
            return value[:_SHOWN_CHARS]
        case list() if depth:
            return [_beginning(item, depth - 1) for item in value[:_SHOWN_CHARS]]
        case dict() if depth:
            return {_beginning(k, 0): _beginning(v, depth - 1) for k, v in islice(value.items(), _SHOWN_CHARS)}
        case list() | dict():
            return ...
        case _:
            return value


def _known_fields(schema: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that the model knows; null means not given. Raises on any other that asks for something."""
    known = schema.model_fields
    fields = {}
    for name, value in data.items():
        if name in known:
            if value is not None or known[name].is_required():
                fields[name] = value
        elif name in _UNSUPPORTED:
            if value is not None and not any(_same(value, neutral) for neutral in _UNSUPPORTED[name]):
                raise InvalidRequestError(f"{name}: is not supported yet, got {shown(value)}.", name, "unsupported")
        elif name not in HARMLESS:
            raise _unknown_field(name, [*known, *_UNSUPPORTED, *HARMLESS])
    return fields


def _same(value: object, neutral: object) -> bool:
    """Equal, and not merely 1 == True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown_field(param: str, candidates: list[str]) -> InvalidRequestError:
    param = param[:_SHOWN_CHARS]
    prefix, _, name = param.rpartition(".")
    near = difflib.get_close_matches(name, candidates, n=1)
    hint = f" Did you mean {f'{prefix}.{near[0]}' if prefix else near[0]!r}?" if near else ""
    return InvalidRequestError(f"{param}: is not a known field.{hint}", param, "unknown_field")


def _as_request_error(schema: type[BaseModel], error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's findings, in the words of this API."""
    found = error.errors(include_url=False)[0]
    param = ""
    for part in found["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    kind = found["type"]
    if kind == "missing":
        return InvalidRequestError(f"{param}: is required.", param, "missing_field")
    if kind == "extra_forbidden":
        return _unknown_field(param, _names_at(schema, found["loc"]))
    if kind == "too_many":
        return InvalidRequestError(f"{param}: {found['msg']}.", param)
    if kind == "literal_error":
        wanted = f"must be {found['ctx']['expected']}"
    else:
        wanted = f"must be {_WANTED[kind]}" if kind in _WANTED else found["msg"]
    return InvalidRequestError(f"{param}: {wanted}, got {shown(found['input'])}.", param)


def _names_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the model in which the last part of `loc` was not known."""
    nested: Any = schema
    for part in loc[:-1]:
        if isinstance(part, str):
            annotation = nested.model_fields[part].annotation
            nested = next(
                (kind for kind in (annotation, *getattr(annotation, "__args__", ())) if hasattr(kind, "model_fields")),
                None,
            )
        if nested is None:
            return []
    return list(nested.model_fields)
