"""Logprobs of tokens in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.detokenizer import TokenDecoder
from quire.engine.outputs import TokenLogprobs

from .responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

_LOWEST = -9999.0  # OpenAI's value for what is all but impossible; JSON has no infinity


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    """A token as text; bytes that are no whole character show as replacement characters."""
    return decoder.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(entries: Sequence[TokenLogprobs], decoder: TokenDecoder) -> ChatLogprobs:
    return ChatLogprobs([_token_logprob(entry, decoder) for entry in entries])


def _token_logprob(entry: TokenLogprobs, decoder: TokenDecoder) -> TokenLogprob:
    top = [
        TopLogprob(token_text(decoder, token_id), max(logprob, _LOWEST), list(decoder.token_bytes(token_id)))
        for token_id, logprob in entry.top
    ]
    data = decoder.token_bytes(entry.token_id)
    return TokenLogprob(data.decode("utf-8", "replace"), max(entry.logprob, _LOWEST), list(data), top)


def completion_logprobs(
    entries: Sequence[TokenLogprobs], decoder: TokenDecoder, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The four lists of `entries`, whose first token starts at character `offset`; and the offset after the last.

    `top_logprobs` holds the likeliest tokens and the sampled one. Of tokens with one text the likeliest is kept.
    """
    offsets, tops, texts = [], [], []
    for entry in entries:
        text = token_text(decoder, entry.token_id)
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(decoder, token_id), max(logprob, _LOWEST))
        offsets.append(offset)
        texts.append(text)
        tops.append(top)
        offset += len(text)
    logprobs = [max(entry.logprob, _LOWEST) for entry in entries]
    return CompletionLogprobs(offsets, logprobs, texts, tops), offset
