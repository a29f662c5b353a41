"""What a kind of attention needs of the cache: one small policy per KV cache group.

All groups of a request have block tables of the same logical length; a windowed group's table holds the null block
where the window has left a block behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .kv_cache_spec import KVCacheSpec


class AttentionPolicy(Protocol):
    """Arithmetic over block indices of one request. Holds no state."""

    def hit_length(self, num_blocks: int, is_cached: Callable[[int], bool]) -> int:
        """The longest prefix, in blocks and at most `num_blocks`, that can be used with what is cached."""
        ...

    def first_needed(self, num_computed_tokens: int) -> int:
        """Index of the first block that the token at position `num_computed_tokens` or a later one can attend to."""
        ...

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` refers to at once, computed in chunks of `max_chunk_tokens`."""
        ...


class FullAttention:
    """Every token attends to all before it: the whole prefix must be cached, and nothing is left behind."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def hit_length(self, num_blocks: int, is_cached: Callable[[int], bool]) -> int:
        return next((index for index in range(num_blocks) if not is_cached(index)), num_blocks)

    def first_needed(self, num_computed_tokens: int) -> int:  # noqa: ARG002
        return 0

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:  # noqa: ARG002
        return -(-num_tokens // self._block_size)


class SlidingWindow:
    """A token attends to itself and the `window - 1` tokens before it.

    blocks   | 0 | 1 | 2 | 3 | 4 | 5 |        block_size 4, window 6, num_computed_tokens 18
    tokens    ....xxxx.xxxxooooo|q            q attends to o (positions 13 to 17): blocks 0 to 2 are left behind
    """

    def __init__(self, block_size: int, window: int) -> None:
        self._block_size = block_size
        self._window = window

    def hit_length(self, num_blocks: int, is_cached: Callable[[int], bool]) -> int:
        """A prefix of n blocks is usable if the blocks that the token after it attends to are cached."""
        end = num_blocks
        while end > 0:
            first = self.first_needed(end * self._block_size)
            missing = next((index for index in range(end - 1, first - 1, -1) if not is_cached(index)), None)
            if missing is None:
                return end
            end = missing
        return 0

    def first_needed(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self._window + 1, 0) // self._block_size

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        span = min(num_tokens, self._window - 1 + max_chunk_tokens)
        return min(-(-span // self._block_size) + 1, -(-num_tokens // self._block_size))


def policy_for(spec: KVCacheSpec) -> AttentionPolicy:
    if spec.sliding_window is None:
        return FullAttention(spec.block_size)
    return SlidingWindow(spec.block_size, spec.sliding_window)


def common_hit_length(
    policies: Sequence[AttentionPolicy], num_blocks: int, is_cached: Callable[[int, int], bool]
) -> int:
    """The longest prefix, in blocks, that every group can use. `is_cached(group, index)`.

    A full group that can use n blocks can use fewer, a windowed one perhaps not, so the groups take turns until nobody
    shortens the prefix any more.
    """
    length, agreed = num_blocks, 0
    while agreed < len(policies):
        agreed = 0
        for group, policy in enumerate(policies):
            shorter = policy.hit_length(length, lambda index, group=group: is_cached(group, index))  # type: ignore[misc]
            agreed = agreed + 1 if shorter == length else 0
            length = shorter
    return length
