"""Logprobs of tokens in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.detokenizer import TokenDecoder
from quire.engine.outputs import PromptLogprobs, TokenLogprobs
from quire.engine.prompt_logprobs import by_token

from .answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsByToken,
    TokenLogprob,
    TopLogprob,
)

_LOWEST = -9999.0  # OpenAI's value for what is all but impossible; JSON has no infinity


class TokenNames(dict[int, tuple[str, list[int]]]):
    """How lists of logprobs name the tokens of one answer, and their bytes; filled as tokens are met.

    A name is the token's text, or (`return_tokens_as_token_ids`) its id, which is unique. Of a token that is no whole
    character it has replacement characters; or, where names tell tokens apart (`spells_bytes`), `bytes:` and its bytes,
    as OpenAI has it there: bytes:\\xf0\\x9f.
    """

    def __init__(self, decoder: TokenDecoder, *, as_ids: bool = False, spells_bytes: bool = False) -> None:
        super().__init__()
        self._decoder = decoder
        self._as_ids = as_ids
        self._spells_bytes = spells_bytes

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        data = self._decoder.token_bytes(token_id)
        value = self[token_id] = self._name(token_id, data), list(data)
        return value

    def _name(self, token_id: int, data: bytes) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            if not self._spells_bytes:
                return data.decode(errors="replace")
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs([_token_logprob(entry, names) for entry in entries])


def _token_logprob(entry: TokenLogprobs, names: TokenNames) -> TokenLogprob:
    top = []
    for token_id, logprob in entry.top:
        name, data = names[token_id]
        top.append(TopLogprob(name, max(logprob, _LOWEST), data))
    name, data = names[entry.token_id]
    return TokenLogprob(name, max(entry.logprob, _LOWEST), data, top)


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
    entries: Sequence[TokenLogprobs], names: TokenNames, text_offsets: TextOffsets
) -> CompletionLogprobs:
    """The four lists of `entries`, which are the next tokens of the text of `text_offsets`.

    `top_logprobs` holds the likeliest tokens and the sampled one. Of tokens with one text the likeliest is kept.
    """
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    tokens = []
    for entry in entries:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(names[token_id][0], max(logprob, _LOWEST))
        offsets.append(text_offsets.next(entry.token_id))
        tokens.append(names[entry.token_id][0])
        tops.append(top)
    logprobs: list[float | None] = [max(entry.logprob, _LOWEST) for entry in entries]
    return CompletionLogprobs(offsets, logprobs, tokens, tops)


def echoed_logprobs(
    prompt_token_ids: Sequence[int],
    text: str,
    told: PromptLogprobs,
    decoder: TokenDecoder,
    names: TokenNames,
    num_top: int,
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
    rest = completion_logprobs(entries, names, offsets)
    return joined(CompletionLogprobs([begin], [None], [names[first][0]], [None]), rest)


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
    names = TokenNames(decoder)
    positions: PromptLogprobsByToken = []
    for entry in by_token(told):
        if entry is None:
            positions.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(entry.top[:num_top])]
        positions.append(
            {
                str(token_id): PromptLogprob(max(logprob, _LOWEST), rank, names[token_id][0])
                for token_id, logprob, rank in ranked
            }
        )
    return positions
