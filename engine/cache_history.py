"""What the prefix cache held and lost: why a prefix missed, and what a larger cache would have kept.

Keys of evicted blocks go to a ghost list as long as the pool, in order of eviction. Cache and ghosts together are
what a cache of twice the size would hold, so a block found among the ghosts is a hit that it would have had.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

from .block_hash import SCOPE_BYTES


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """From now on the engine can reuse the block with this key (`block_hash.block_key`)."""

    key: bytes


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """The block with this key was evicted."""

    key: bytes


class CacheCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Nothing that was stored before can be reused."""


KVEvent = BlockStored | BlockRemoved | CacheCleared


class CacheHistory:
    """Told by the block pool of every key that becomes findable or stops being so.

    `now` is set by the scheduler at each step. Events are kept only after `subscribe`, until they are taken.
    """

    def __init__(self, max_ghosts: int) -> None:
        self.now = 0.0
        self._max_ghosts = max_ghosts
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()  # key -> when it was evicted
        self._contents: Counter[bytes] = Counter()  # content and group, whatever the salt -> findable blocks
        self._events: list[KVEvent] | None = None

    def stored(self, key: bytes) -> None:
        self._ghosts.pop(key, None)
        self._contents[_content(key)] += 1
        if self._events is not None:
            self._events.append(BlockStored(key))

    def removed(self, key: bytes) -> None:
        self._ghosts[key] = self.now
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        content = _content(key)
        self._contents[content] -= 1
        if not self._contents[content]:
            del self._contents[content]
        if self._events is not None:
            self._events.append(BlockRemoved(key))

    def cleared(self) -> None:
        self._ghosts.clear()
        self._contents.clear()
        if self._events is not None:
            self._events.append(CacheCleared())

    def evicted_at(self, key: bytes) -> float | None:
        """When the block with this key was evicted, if that is not too long ago to know."""
        return self._ghosts.get(key)

    def is_elsewhere(self, key: bytes) -> bool:
        """Whether a block that is not cached is cached under another salt or LoRA."""
        return _content(key) in self._contents

    def subscribe(self) -> None:
        """Keep events from now on."""
        if self._events is None:
            self._events = []

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        events = self._events or []
        if events:
            self._events = []
        return events


def _content(key: bytes) -> bytes:
    """A key without what differs between salts: the hash of the tokens, and the KV cache group."""
    return key[:-SCOPE_BYTES] + key[-1:]
