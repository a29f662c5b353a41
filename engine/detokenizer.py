"""Text from tokens, as they come. A stream never holds half a character, and nothing is decoded twice.

For the tokenizers of today's models a token is a fixed string of bytes, whatever stands around it: byte-level BPE
(GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). Their text is the UTF-8 of the
joined bytes: a table and an incremental UTF-8 decoder give the whole decode exactly, in constant time per token.
(`tokenizers.DecodeStream` decodes a window of tokens again for each, keeps the bytes of an unfinished character to
itself at the end, and raises on ill-formed ones.) Any other decoder is asked for a window of text that moves on.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_WORD_START = "▁"  # SentencePiece's mark for a space


class IncrementalDetokenizer(Protocol):
    """The text of one output. Its pieces and what `finish` returns join to the whole decode."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is unfinished."""
        ...

    def finish(self) -> str:
        """Text of what is left unfinished (replacement characters). Called once, at the end."""
        ...


class TokenDecoder:
    """What the tokens of one tokenizer stand for; shared by all of its streams. Belongs to one thread.

    `tokenizer` is a fast tokenizer of transformers. The text is that of its `backend_tokenizer.decode`, with one
    difference in SentencePiece: a character that is complete is text, even when ill-formed bytes follow it directly
    (SentencePiece would take it back; a stream cannot, without holding every character until the next whole token).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        to_bytes, self._strip_left = _bytes_of_tokens(self._backend)
        self._table = _TokenBytes(self._backend, to_bytes) if to_bytes else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; those of a special token are its name, of an unknown id nothing."""
        if self._table is not None:
            return self._table[token_id]
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def special_ids(self, tokens: Iterable[str]) -> dict[str, int]:
        """Those of `tokens` that are special tokens, by their text."""
        return {token: i for token, i in self.added_ids(tokens).items() if i in self._special_ids}

    def added_ids(self, tokens: Iterable[str]) -> dict[str, int]:
        """Those of `tokens` that are never spelled in pieces, by their text."""
        ids = {token: self._backend.token_to_id(token) for token in tokens}
        return {token: token_id for token, token_id in ids.items() if token_id in self._added_ids}

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> IncrementalDetokenizer:
        """A new output. Special tokens in `keep` are never skipped.

        Byte decoders put no spaces between special tokens, whatever is asked for.
        """
        skipped = self._special_ids - keep if skip_special_tokens else frozenset()
        if self._table is not None:
            return _ByteStream(self._table, skipped, self._strip_left)
        joined = frozenset() if spaces_between_special_tokens else self._added_ids
        return _WindowStream(self._backend, skipped, joined)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of an output."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()


class _TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled as tokens are met."""

    def __init__(self, backend: Any, to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self._id_to_token = backend.id_to_token
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        value = self[token_id] = b"" if token is None else self._to_bytes(token)
        return value


class _ByteStream:
    """Bytes from the table through an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_skipped", "_spaces_to_strip", "_table")

    def __init__(self, table: _TokenBytes, skipped: frozenset[int], spaces_to_strip: int) -> None:
        self._table = table
        self._skipped = skipped
        self._spaces_to_strip = spaces_to_strip
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._decode(self._table[token_id])
        return self._stripped(text) if self._spaces_to_strip and text else text

    def _stripped(self, text: str) -> str:
        """SentencePiece writes a space before the first word: it is not part of the text."""
        kept = text
        while self._spaces_to_strip and kept.startswith(" "):
            kept = kept[1:]
            self._spaces_to_strip -= 1
        if kept:
            self._spaces_to_strip = 0
        return kept

    def finish(self) -> str:
        return self._decode(b"", True)


class _WindowStream:
    """The text of a few tokens that were read already, against that of the same tokens and the new ones.

    `ids[prefix:read]` give the context that the decoder may need (a space between words); `ids[read:]` are not text
    yet. Between two tokens of `joined` there is no space.
    """

    __slots__ = ("_backend", "_ids", "_joined", "_prefix", "_prefix_text", "_read", "_skipped")

    def __init__(self, backend: Any, skipped: frozenset[int], joined: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._joined = joined
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self._prefix_text = ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text: str = self._backend.decode(self._ids[self._prefix :], skip_special_tokens=False)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._prefix_text):
            return ""
        new = text[len(self._prefix_text) :]
        if self._joined.issuperset(self._ids[-2:]) and len(self._ids) > 1:
            new = new.removeprefix(" ")
        self._prefix, self._read = self._read, len(self._ids)
        self._prefix_text = self._backend.decode(self._ids[self._prefix :], skip_special_tokens=False)
        return new

    def finish(self) -> str:
        text: str = self._backend.decode(self._ids[self._prefix :], skip_special_tokens=False)
        return text[len(self._prefix_text) :]


def _bytes_of_tokens(backend: Any) -> tuple[Callable[[str], bytes] | None, int]:
    """How a token's name becomes its bytes, and how many leading spaces the text loses. None for any other decoder."""
    decoder = backend.decoder
    steps: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    if steps["type"] == "ByteLevel":
        return _byte_level, 0
    if steps["type"] != "Sequence":
        return None, 0
    kinds = [step["type"] for step in steps["decoders"]]
    if kinds == ["ByteLevel"]:
        return _byte_level, 0
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None, 0
    replace, strip = steps["decoders"][0], steps["decoders"][3:]
    if (replace["pattern"], replace["content"]) != ({"String": _WORD_START}, " "):
        return None, 0
    if strip and (strip[0]["content"], strip[0]["stop"]) != (" ", 0):
        return None, 0
    return _byte_fallback, strip[0]["start"] if strip else 0


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: most stand for themselves, the others for 256 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token in the byte alphabet; an added one (with a character outside of it) stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    """`<0xE4>` is a byte; in any other token the mark of a word's start is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # a token that only looks like one
    return token.replace(_WORD_START, " ").encode()
