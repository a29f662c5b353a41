"""Tokenizers of the three kinds that models have, trained on a few lines: no files, no network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a king; he had three sons.",
    "Grüße aus Köln, où l'été est très doux. Ein Stück Käse kostet 3,50 €.",
    "你好，世界。今天天气很好。 こんにちは世界。안녕하세요 세계.",
    "🎉🎉 party 👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪",
    "def f(x):\n    return  x * 2\n\n\tindent\r\n",
]
SPECIAL = ["<|end|>", "<|start|>"]
TEXTS = [
    *CORPUS,
    " leading and trailing ",
    "   three spaces",
    "héllo 🙂 wörld 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 مرحبا שלום ไทย",
    "a<|end|>b <|start|> c",
    "STOP here, added token inside",
    "\u200b\ufeff zero width \u0301 combining",
    "replacement \ufffd character",
    "",
]


def _finished(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("added token", normalized=False)])
    return SimpleNamespace(backend_tokenizer=tokenizer)


def byte_level() -> Any:
    """GPT-2's kind: every byte has a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer)


def sentencepiece(*, strip: bool = True) -> Any:
    """Llama 2's kind: `▁` for spaces, `<0x..>` for bytes that no token has; Gemma's does not strip."""
    pieces = sorted({char for text in CORPUS[:2] for char in text if char not in " \n\r\t"})
    words = ["▁the", "▁The", "▁quick", "▁fox", "ing", "he", "th", "▁▁", "你"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for token in ["▁", *pieces, *words]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    from tokenizers import normalizers

    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _finished(tokenizer)


def metaspace() -> Any:
    """A kind that is not known by its table: decoded through a window."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)
    )
    return _finished(tokenizer)
