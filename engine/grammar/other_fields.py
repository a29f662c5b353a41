"""What a request forbids beside its grammar: to end. The sampler heeds it as well; here one knows what is left.

Fields that forbid other tokens are refused together with a grammar (`check_other_fields`), as they could leave none.
"""

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

    def forbid(self, mask: IntArray) -> None:
        """Clear the bits of tokens that may not come next."""
        if self._ignore_eos or len(self.said) < self._min_tokens:
            clear_bits(mask, self.eos_token_ids)


def set_bits(mask: IntArray, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)


def clear_bits(mask: IntArray, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(0xFFFF_FFFF ^ 1 << token_id % 32)
