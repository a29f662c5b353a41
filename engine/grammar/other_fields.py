"""What a request forbids beside its grammar. The sampler heeds it as well; here one knows whether anything is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..outputs import IntArray

if TYPE_CHECKING:
    from ..outputs import EngineRequest
    from .vocabulary import Vocabulary


class OtherFields:
    """`said` are the output tokens so far, appended by the owner."""

    def __init__(self, source: EngineRequest, vocabulary: Vocabulary) -> None:
        params = source.sampling_params

        def known(token_ids: Sequence[int]) -> list[int]:
            return [token_id for token_id in token_ids if token_id < vocabulary.vocab_size]

        self.said: list[int] = []
        self.eos_token_ids = known(source.eos_token_ids)
        self._ignore_eos = params.ignore_eos
        self._min_tokens = params.min_tokens
        self._stop_token_ids = known(params.stop_token_ids)
        self._bad_words = [sequence for sequence in params.bad_words_token_ids if sequence and known(sequence[-1:])]
        self._allowed: IntArray | None = None
        if params.allowed_token_ids is not None:
            self._allowed = np.zeros(vocabulary.num_words, np.int32)
            set_bits(self._allowed, known(params.allowed_token_ids))

    def forbid(self, mask: IntArray) -> None:
        """Clear the bits of tokens that may not come next."""
        early = len(self.said) < self._min_tokens
        if early:
            clear_bits(mask, self._stop_token_ids)
        if early or self._ignore_eos:
            clear_bits(mask, self.eos_token_ids)
        if self._allowed is not None:
            mask &= self._allowed
        for sequence in self._bad_words:
            length = len(sequence) - 1
            if length <= len(self.said) and tuple(self.said[len(self.said) - length :]) == tuple(sequence[:-1]):
                clear_bits(mask, sequence[-1:])


def set_bits(mask: IntArray, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)


def clear_bits(mask: IntArray, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(0xFFFF_FFFF ^ 1 << token_id % 32)
