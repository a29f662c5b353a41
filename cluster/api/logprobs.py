"""Logprobs of tokens in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.detokenizer import TokenDecoder
from quire.engine.outputs import PromptLogprobs, TokenLogprobs
from quire.engine.prompt_logprobs import by_token

from .responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsByToken,
    TokenLogprob,
    TopLogprob,
)

_LOWEST = -9999.0  # OpenAI's value for what is all but impossible; JSON has no infinity


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    """A token as text; bytes that are no whole character show as replacement characters."""
    return decoder.token_bytes(token_id).decode("utf-8", "replace")


def token_name(decoder: TokenDecoder, token_id: int, *, as_ids: bool) -> str:
    """A token as a list of logprobs names it: its text, or (`return_tokens_as_token_ids`) its id, which is unique."""
    return f"token_id:{token_id}" if as_ids else token_text(decoder, token_id)


def chat_logprobs(entries: Sequence[TokenLogprobs], decoder: TokenDecoder, *, as_ids: bool = False) -> ChatLogprobs:
    return ChatLogprobs([_token_logprob(entry, decoder, as_ids) for entry in entries])


def _token_logprob(entry: TokenLogprobs, decoder: TokenDecoder, as_ids: bool) -> TokenLogprob:
    top = [
        TopLogprob(
            token_name(decoder, token_id, as_ids=as_ids), max(logprob, _LOWEST), list(decoder.token_bytes(token_id))
        )
        for token_id, logprob in entry.top
    ]
    name, data = token_name(decoder, entry.token_id, as_ids=as_ids), decoder.token_bytes(entry.token_id)
    return TokenLogprob(name, max(entry.logprob, _LOWEST), list(data), top)


class TextOffsets:
    """Where the tokens of one text begin in it, in order: after the text that those before have completed. The tokens
    that spell a character together all begin where it does.

    `position` is where the next one will.
    """

    def __init__(
        self, decoder: TokenDecoder, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._stream = decoder.stream(
            skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens
        )
        self.position = 0

    def next(self, token_id: int) -> int:
        begin = self.position
        self.position += len(self._stream.push(token_id))
        return begin


def completion_logprobs(
    entries: Sequence[TokenLogprobs], decoder: TokenDecoder, text_offsets: TextOffsets, *, as_ids: bool = False
) -> CompletionLogprobs:
    """The four lists of `entries`, which are the next tokens of the text of `text_offsets`.

    `top_logprobs` holds the likeliest tokens and the sampled one. Of tokens with one text the likeliest is kept.
    """
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    names = []
    for entry in entries:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_name(decoder, token_id, as_ids=as_ids), max(logprob, _LOWEST))
        offsets.append(text_offsets.next(entry.token_id))
        names.append(token_name(decoder, entry.token_id, as_ids=as_ids))
        tops.append(top)
    logprobs: list[float | None] = [max(entry.logprob, _LOWEST) for entry in entries]
    return CompletionLogprobs(offsets, logprobs, names, tops)


def echoed_logprobs(
    prompt_token_ids: Sequence[int],
    text: str,
    told: PromptLogprobs,
    decoder: TokenDecoder,
    num_top: int,
    *,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """The four lists of a prompt that is echoed as `text`. Its first token has no logprobs: nothing precedes it."""
    first = prompt_token_ids[0]
    entries = [
        TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:num_top])
        for entry in by_token(told)
        if entry is not None
    ]
    # A text holds the special tokens that its author wrote, and not those that the tokenizer adds.
    is_spelled_out = decoder.decode(list(prompt_token_ids), skip_special_tokens=False) == text
    offsets = TextOffsets(decoder, skip_special_tokens=not is_spelled_out)
    begin = offsets.next(first)
    rest = completion_logprobs(entries, decoder, offsets, as_ids=as_ids)
    return joined(CompletionLogprobs([begin], [None], [token_name(decoder, first, as_ids=as_ids)], [None]), rest)


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )


def prompt_logprobs_by_token(
    told: PromptLogprobs | None, decoder: TokenDecoder, num_top: int
) -> PromptLogprobsByToken | None:
    """vLLM's shape: at every position the prompt's own token, then the likeliest. None where nothing was told."""
    if told is None:
        return None
    positions: PromptLogprobsByToken = []
    for entry in by_token(told):
        if entry is None:
            positions.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(entry.top[:num_top])]
        positions.append(
            {
                str(token_id): PromptLogprob(max(logprob, _LOWEST), rank, token_text(decoder, token_id))
                for token_id, logprob, rank in ranked
            }
        )
    return positions
