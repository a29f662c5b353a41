"""What routers call a block: a 64-bit number made of the key under which engines cache it (`engine/block_hash.py`).

Numbers and not keys, because a gateway keeps one for every block of every engine: 8 bytes instead of 49 on the wire,
and an integer to look up. Two keys with the same number would only mislead a choice, never a cache.

    | scope and content, 48 bits | content, 16 bits |

The low bits come from the content alone, so that the blocks of a prompt which an index remembers when it cannot
remember all (`CacheIndex`) are the same for every group and salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from quire.engine.block_hash import group_scope, hash_prompt, hash_scope
from quire.engine.outputs import EngineRequest

CONTENT_BITS = 16
_CONTENT_BYTES = 32
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How an engine cuts prompts into blocks. `windows` has one entry per KV cache group: its sliding window in
    tokens, None for full attention.
    """

    block_size: int
    windows: tuple[int | None, ...]


def number_of(key: bytes) -> int:
    """The number of a block from its key in an engine's cache."""
    return int.from_bytes(key[:_WORD_BYTES], "little") ^ _scope_number(key[_CONTENT_BYTES:])


@lru_cache(maxsize=4096)  # one entry per group, salt and LoRA
def _scope_number(scope: bytes) -> int:
    return int.from_bytes(sha256(scope).digest()[:6], "little") << CONTENT_BITS


class PromptKeys:
    """The numbers of a prompt's full blocks, for the layouts that engines have. Each layout is computed once.

    A prompt's last token is always computed, so a block that ends with it does not count.
    """

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._of: dict[CacheLayout, tuple[list[int], ...]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._request.prompt_token_ids)

    def has(self, layout: CacheLayout) -> bool:
        return layout in self._of

    def of(self, layout: CacheLayout) -> tuple[list[int], ...]:
        """Per KV cache group, the numbers of the blocks from the first on."""
        found = self._of.get(layout)
        if found is None:
            found = self._of[layout] = self._compute(layout)
        return found

    def _compute(self, layout: CacheLayout) -> tuple[list[int], ...]:
        request = self._request
        num_blocks = (len(request.prompt_token_ids) - 1) // layout.block_size
        hashes = hash_prompt(request.prompt_token_ids, num_blocks, layout.block_size, request.media)
        words = [int.from_bytes(each[:_WORD_BYTES], "little") for each in hashes]
        scope = hash_scope(request.cache_salt, request.lora_id)
        numbers = [_scope_number(group_scope(scope, group)) for group in range(len(layout.windows))]
        return tuple([word ^ number for word in words] for number in numbers)


def pack(numbers: Iterable[int]) -> bytes:
    """Block numbers as they travel: 8 bytes each, in this machine's order (nobody mixes them in one cluster)."""
    return array("Q", numbers).tobytes()


def unpack(data: bytes) -> Sequence[int]:
    """Raises `ValueError` on bytes that `pack` has not made."""
    numbers = array("Q")
    numbers.frombytes(data)
    return numbers
