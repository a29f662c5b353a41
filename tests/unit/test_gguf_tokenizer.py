"""Tokenizers that come out of the metadata of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_tokenizers import CORPUS, TEXTS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from quire.engine.errors import ConfigError
from quire.engine.gguf_config import gguf_config
from quire.engine.gguf_file import GGUFFile, GGUFTensor
from quire.engine.gguf_tokenizer import gguf_tokenizer
from quire.engine.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PATH = Path("model.gguf")
CAMEL = "aCamelWord didn't I'LL 12345 x²\n\n  é!?/\n"


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """A small vocabulary, with a control token behind it and one of a user."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocab = trained.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|im_end|>", "added token"]
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * len(vocab) + [CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(vocab),
        "tokenizer.ggml.eos_token_id": len(vocab),
        **more,
    }


def words(pre: str, text: str) -> list[str]:
    """How a text is cut, with spaces and line ends as they are."""
    tokenizer = gguf_tokenizer(PATH, byte_level(pre))
    assert tokenizer.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["aCamelWord", " didn", "'t", " I", "'", "LL", " 12345", " x", "²", "\n\n ", " é", "!?/", "\n"]),
        (
            "smollm",
            ["aCamelWord", " didn", "'t", " I", "'", "LL", " ", *"12345", " x", "²", "\n\n ", " é", "!?/", "\n"],
        ),
        (
            "llama-bpe",
            ["aCamelWord", " didn", "'t", " I", "'LL", " ", "123", "45", " x", "²", "\n\n", " ", " é", "!?/\n"],
        ),
        ("qwen2", ["aCamelWord", " didn", "'t", " I", "'LL", " ", *"12345", " x", "²", "\n\n", " ", " é", "!?/\n"]),
        (
            "tekken",
            ["a", "Camel", "Word", " didn", "'t", " I", "'LL", " ", *"12345", " x", "²", "\n\n", " ", " é", "!?/\n"],
        ),
        (
            "gpt-4o",
            ["a", "Camel", "Word", " didn't", " I'LL", " ", "123", "45", " x", "²", "\n\n", " ", " é", "!?/\n"],
        ),
    ],
)
def test_where_texts_are_cut(pre: str, expected: list[str]) -> None:
    assert words(pre, CAMEL) == expected


def test_what_an_old_file_leaves_open_is_told(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level("gpt-2")
    tokenizer = gguf_tokenizer(PATH, metadata)
    assert not caplog.records
    del metadata["tokenizer.ggml.pre"]
    assert gguf_tokenizer(PATH, metadata).encode(CAMEL).ids == tokenizer.encode(CAMEL).ids
    assert "model.gguf does not say how texts are cut (tokenizer.ggml.pre)" in caplog.text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "command-r"])
def test_byte_level_texts_come_back(pre: str) -> None:
    """Composed first where the model's tokenizer does that."""
    tokenizer = gguf_tokenizer(PATH, byte_level(pre, **{"tokenizer.ggml.add_bos_token": False}))
    for text in [*TEXTS, "e\u0301"]:
        composes = pre in ("qwen2", "command-r")
        expected = text if not composes else text.replace("e\u0301", "é")
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected, text


def test_words_that_are_tokens_stay_one() -> None:
    """Of Llama 3 and Mistral; for others the merges decide."""
    for pre, expected in (("llama-bpe", 1), ("dbrx", 3)):
        metadata = byte_level(pre)
        metadata["tokenizer.ggml.tokens"][-1] = "xyz"
        metadata["tokenizer.ggml.token_type"][-1] = NORMAL
        assert len(gguf_tokenizer(PATH, metadata).encode("xyz", add_special_tokens=False)) == expected


@pytest.mark.parametrize(
    ("pre", "said", "first", "last"),
    [
        ("llama-bpe", {}, 1, 0),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, 0, 0),
        ("qwen2", {}, 0, 0),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, 1, 0),
        ("qwen2", {"tokenizer.ggml.add_eos_token": True}, 0, 1),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, 1, 1),
    ],
)
def test_tokens_around_a_text(pre: str, said: dict[str, bool], first: int, last: int) -> None:
    metadata = byte_level(pre, **said)
    special = metadata["tokenizer.ggml.bos_token_id"]
    inside = gguf_tokenizer(PATH, metadata).encode("The fox", add_special_tokens=False).ids
    assert gguf_tokenizer(PATH, metadata).encode("The fox").ids == [special] * first + inside + [special] * last


PIECES = [
    "▁",
    "▁t",
    "h",
    "e",
    "he",
    "▁the",
    "t",
    "th",
    "a",
    "b",
    "ab",
    "ba",
    "▁▁",
    "aba",
    "c",
    "bc",
    "é",
    "▁a",
    "re",
    "r",
]


def sentencepiece(*, prefix: bool) -> dict[str, Any]:
    """Scores as SentencePiece gives them, by the order of learning; letters come last."""
    order = [piece for piece in PIECES if len(piece) > 1] + [piece for piece in PIECES if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|user|>", "ttt"]
    scores = [0.0] * 259 + [-float(order.index(piece)) for piece in PIECES] + [-1000.0, -1000.0]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES) + [CONTROL, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def merged(text: str, metadata: dict[str, Any]) -> list[int]:
    """What SentencePiece does: of all neighbours that are a piece together, the best first; letters that are no piece
    become bytes (https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc)."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    symbols, scores = list(text), metadata["tokenizer.ggml.scores"]
    while True:
        joined = [(i, symbols[i] + symbols[i + 1]) for i in range(len(symbols) - 1)]
        found = [(-scores[ids[pair]], i, pair) for i, pair in joined if pair in PIECES]
        if not found:
            break
        _, i, pair = min(found)
        symbols[i : i + 2] = [pair]
    of_bytes = [
        [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()] for symbol in symbols
    ]
    return [token for tokens in of_bytes for token in tokens]


SPM_TEXTS = ["the", "the the", " the", "there  bath", "ababab", "abcbaba aba", "héthe", "z\n🙂 the", "", "   ", "a b c"]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", SPM_TEXTS)
def test_sentencepiece_merges_the_best_first(prefix: bool, text: str) -> None:
    metadata = sentencepiece(prefix=prefix)
    tokenizer = gguf_tokenizer(PATH, metadata)
    normalized = (" " + text if prefix and text else text).replace(" ", "▁")
    ids = tokenizer.encode(text).ids
    assert ids == [1, *merged(normalized, metadata)]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_with_tokens_of_its_own() -> None:
    """Control tokens in a text are themselves; users' too, before anything is merged."""
    metadata = sentencepiece(prefix=True)
    tokens = gguf_tokenizer(PATH, metadata).encode("<|user|>the</s>attta").tokens
    assert tokens == ["<s>", "<|user|>", "▁the", "</s>", "▁a", "ttt", "▁a"]
    tokens = gguf_tokenizer(PATH, sentencepiece(prefix=False)).encode("<|user|>the</s>attta").tokens
    assert tokens == ["<s>", "<|user|>", "t", "he", "</s>", "a", "ttt", "a"]


def test_spaces_behind_marks_of_phi3() -> None:
    """They are none of its texts, but behind the three that its own tokenizer leaves as they are."""
    metadata = sentencepiece(prefix=True)
    text = "<|user|>\nthe</s>\n<s> the"
    plain = gguf_tokenizer(PATH, metadata).encode(text, add_special_tokens=False).tokens
    assert plain == ["<|user|>", "▁", "<0x0A>", "t", "he", "</s>", "▁", "<0x0A>", "<s>", "▁", "▁the"]
    phi3 = gguf_tokenizer(PATH, {**metadata, "general.architecture": "phi3"})
    tokens = [metadata["tokenizer.ggml.tokens"][i] for i in phi3.encode(text, add_special_tokens=False).ids]
    assert tokens == ["<|user|>", "▁the", "</s>", "<s>", "▁", "▁the"]


def test_bytes_that_are_written_out_are_text() -> None:
    """`<0x41>` in a text is six characters, none of which is a piece here, and no byte."""
    tokenizer = gguf_tokenizer(PATH, sentencepiece(prefix=False))
    assert tokenizer.decode(tokenizer.encode("<0x41>").ids) == "<0x41>"
    assert "<0x41>" not in tokenizer.encode("<0x41>").tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"\(bert/qwen2\) is not supported; SentencePiece \(llama\) is"),
        ({"tokenizer.ggml.pre": "klingon"}, r"\(gpt2/klingon\) is not supported.*with default, gpt-2"),
    ],
)
def test_refused_kinds(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gguf_tokenizer(PATH, {**byte_level("qwen2"), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.merges": ["Ġ nowhere"]},
        {"tokenizer.ggml.merges": [1, 2]},
        {"tokenizer.ggml.token_type": [NORMAL]},
        {"tokenizer.ggml.padding_token_id": "x"},
        {"tokenizer.ggml.tokens": 7},
    ],
    ids=lambda changes: "-".join(map(str, next(iter(changes.items())))),
)
def test_damaged_metadata(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {**byte_level("qwen2"), **changes}
    monkeypatch.setattr("quire.engine.tokenizer.read_gguf", lambda path: GGUFFile(path, metadata, {}))
    info = SimpleNamespace(path=PATH, format="gguf", hf_config={"max_position_embeddings": 64}, vocab_size=1000)
    with pytest.raises(ConfigError, match=r"model.gguf holds no complete tokenizer"):
        load_tokenizer(info)  # type: ignore[arg-type]


def test_all_ends_of_an_answer() -> None:
    """The file's own first, then control tokens that are known to end a text or a turn."""
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "</s>"]
    kinds = [NORMAL, CONTROL, CONTROL, NORMAL, USER_DEFINED, CONTROL]
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2",
        **{f"qwen2.{key}": size for key, size in sizes.items()},
        "qwen2.attention.head_count": 2,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 0,
    }
    file = GGUFFile(PATH, metadata, {"token_embd.weight": GGUFTensor("token_embd.weight", (6, 8), 0, PATH, 0)})
    assert gguf_config(file)["eos_token_id"] == [5, 0, 1, 2, 4]
