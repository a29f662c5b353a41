"""Prompts as the API takes them: a text, token ids, or a list of either."""

from __future__ import annotations

from quire.engine.errors import InvalidRequestError


def num_prompts(value: object) -> int:
    """How many `prompts_of` gives, if it takes the value: a list of numbers is one, and may be long."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], str | list) else 1


def prompts_of(value: object, param: str) -> list[str | list[int]]:
    """One entry per prompt. `param` is the field that holds them. Raises `InvalidRequestError`."""
    prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(one, str) or _is_token_ids(one) for one in prompts):
        raise InvalidRequestError(
            f"{param}: must be a string, a list of token ids, or a list of either, and none of them empty.", param
        )
    if not prompts or not all(prompts):
        raise InvalidRequestError(f"{param}: must not be empty.", param)
    return prompts


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)
