"""Texts to token ids, with bounds on what that costs."""

from __future__ import annotations

import re

from quire.engine.errors import InvalidRequestError

from .backend import ServedModel

_MARGIN_TOKENS = 256
_USUAL_CHARS = 8  # of a token, or more: the first guess at how much of a text holds so many tokens
_WORD_SEARCH_CHARS = 4096
_BEFORE_WORD = re.compile(r"(?<=\S) (?=\S)")


def tokenize(served: ServedModel, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises `InvalidRequestError` for one that cannot fit. Other threads run meanwhile."""
    served.input_processor.check_length(text, param)
    return _encode(served, text, add_special_tokens=add_special_tokens)


def tokenize_any(served: ServedModel, text: str, *, param: str, add_special_tokens: bool, max_chars: int) -> list[int]:
    """Token ids of a text that need not fit. Raises `InvalidRequestError` for more than `max_chars` characters."""
    if len(text) > max_chars:
        raise InvalidRequestError(
            f"{param}: {len(text)} characters given, at most {max_chars} are tokenized at once; "
            "truncate_prompt_tokens keeps the end of a longer text.",
            param,
        )
    return _encode(served, text, add_special_tokens=add_special_tokens)


def tokenize_end(served: ServedModel, text: str, num_tokens: int, *, add_special_tokens: bool) -> list[int]:
    """The last `num_tokens` token ids of a text, at the cost of its end.

    Where the text is cut, the tokens may be others than in the whole, until both have a boundary in common: from there
    on they are the same. The cut is before a word, where there is one, which is a boundary of every tokenizer that
    keeps words apart; and it is `_MARGIN_TOKENS` before the first token that is kept, for the others. (Only a text
    without any structure, such as one letter repeated, can stay out of step for longer than that: its tokens are then
    another division of the same text.)
    """
    num_chars = (num_tokens + _MARGIN_TOKENS) * _USUAL_CHARS
    while True:
        start = _word_after(text, len(text) - num_chars)
        token_ids = _encode(served, text[start:], add_special_tokens=add_special_tokens)
        if start == 0 or len(token_ids) >= num_tokens + _MARGIN_TOKENS:
            return token_ids[-num_tokens:]
        num_chars *= 4


def tokenize_start(served: ServedModel, text: str, num_tokens: int, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, or of a beginning whose first `num_tokens` are those of the whole, and more (special ones
    at its end, too). As in `tokenize_end`."""
    num_chars = (num_tokens + _MARGIN_TOKENS) * _USUAL_CHARS
    while True:
        end = _word_after(text, num_chars) if num_chars < len(text) else len(text)
        token_ids = _encode(served, text[:end], add_special_tokens=add_special_tokens)
        if end == len(text) or len(token_ids) >= num_tokens + _MARGIN_TOKENS:
            return token_ids
        num_chars *= 4


def _word_after(text: str, at: int) -> int:
    if at <= 0:
        return 0
    found = _BEFORE_WORD.search(text, at, at + _WORD_SEARCH_CHARS)
    return at if found is None else found.start()


def _encode(served: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    # The batch form, for one text: `encode` would keep the interpreter's lock.
    (encoding,) = served.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    token_ids: list[int] = encoding.ids
    return token_ids
