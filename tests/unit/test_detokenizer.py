"""Incremental text against the whole decode of the tokenizer itself."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from small_tokenizers import TEXTS, byte_level, metaspace, sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models

from quire.engine.detokenizer import TokenDecoder

KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece_unstripped": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def pieces(decoder: TokenDecoder, token_ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    stream = decoder.stream(skip_special_tokens=skip_special_tokens)
    return [*(stream.push(token_id) for token_id in token_ids), stream.finish()]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_join_to_the_whole_decode(tokenizer: Any, skip_special_tokens: bool) -> None:
    decoder, backend = TokenDecoder(tokenizer), tokenizer.backend_tokenizer
    for text in TEXTS:
        token_ids = backend.encode(text, add_special_tokens=False).ids
        whole = backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        parts = pieces(decoder, token_ids, skip_special_tokens)
        assert "".join(parts) == whole
        assert decoder.decode(token_ids, skip_special_tokens=skip_special_tokens) == whole
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


def test_texts_cut_anywhere_join_to_the_whole_decode(tokenizer: Any) -> None:
    """As an answer is cut by max_tokens: in the middle of a character, too.

    There SentencePiece's own decode takes back the characters before it that came from bytes; a stream has shown them.
    """
    generator = random.Random(1)
    decoder, backend = TokenDecoder(tokenizer), tokenizer.backend_tokenizer
    for _ in range(300):
        text = " ".join(generator.sample([text for text in TEXTS if "\ufffd" not in text], 3))
        token_ids = backend.encode(text, add_special_tokens=False).ids
        cut = token_ids[: generator.randrange(1, len(token_ids) + 1)]
        streamed, whole = decoder.decode(cut), backend.decode(cut)
        if "<0xE4>" in backend.get_vocab() and "\ufffd" in whole:
            assert streamed.endswith("\ufffd")
            assert backend.decode(token_ids).startswith(streamed.rstrip("\ufffd"))
        else:
            assert streamed == whole


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_tokens_of_a_byte_level_vocabulary(skip_special_tokens: bool) -> None:
    """Ill-formed UTF-8 of every kind, ids that do not exist, added tokens: still the whole decode, exactly."""
    tokenizer = byte_level()
    decoder, backend = TokenDecoder(tokenizer), tokenizer.backend_tokenizer
    generator = random.Random(2)
    size = backend.get_vocab_size() + 5
    for _ in range(3000):
        high = size if generator.random() < 0.5 else 256  # many single bytes
        token_ids = [generator.randrange(high) for _ in range(generator.randrange(1, 16))]
        assert decoder.decode(token_ids, skip_special_tokens=skip_special_tokens) == backend.decode(
            token_ids, skip_special_tokens=skip_special_tokens
        )


def test_half_a_character_is_held_and_shown_once_it_is_whole() -> None:
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    byte_ids = [backend.token_to_id(char) for char in "ðŁĻĤ"]  # the four bytes of 🙂
    assert pieces(TokenDecoder(tokenizer), byte_ids) == ["", "", "", "🙂", ""]
    assert pieces(TokenDecoder(tokenizer), byte_ids[:3]) == ["", "", "", "\ufffd"]


def test_a_sentencepiece_answer_loses_only_the_first_space() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.backend_tokenizer.token_to_id(token) for token in ("▁", "▁the", "▁fox")]
    assert pieces(TokenDecoder(tokenizer), ids) == ["", " the", " fox", ""]
    assert pieces(TokenDecoder(tokenizer), ids[1:]) == ["the", " fox", ""]


def test_a_whole_character_is_shown_though_a_stray_byte_follows() -> None:
    """The documented difference from SentencePiece, which takes back the whole run of bytes."""
    tokenizer = sentencepiece()
    ids = [tokenizer.backend_tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode() + b"\xff"]
    assert pieces(TokenDecoder(tokenizer), ids) == ["", "é", "\ufffd", ""]


def test_bytes_of_single_tokens(tokenizer: Any) -> None:
    decoder = TokenDecoder(tokenizer)
    end = tokenizer.backend_tokenizer.token_to_id("<|end|>")
    assert decoder.token_bytes(end) == b"<|end|>"
    assert decoder.token_bytes(1_000_000) == b""


def test_special_tokens_show_only_when_asked_for(tokenizer: Any) -> None:
    end = tokenizer.backend_tokenizer.token_to_id("<|end|>")
    decoder = TokenDecoder(tokenizer)
    assert decoder.decode([end]) == ""
    assert decoder.decode([end], skip_special_tokens=False) == "<|end|>"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    """Only a decoder that writes them is concerned: here one that joins words with spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("<|x|>", special=True), AddedToken("<|y|>", special=True)])
    decoder = TokenDecoder(SimpleNamespace(backend_tokenizer=tokenizer))
    for spaces, text in ((True, "a <|x|> <|y|> b a"), (False, "a <|x|><|y|> b a")):
        stream = decoder.stream(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join(map(stream.push, [1, 3, 4, 2, 1])) + stream.finish() == text
