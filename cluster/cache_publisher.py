"""The engine's side of `cache_index.py`: tells gateways what its prefix cache holds, one message per step at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.cache_history import BlockRemoved, BlockStored, KVEvent
from quire.engine.core import EngineCore

from .messages import CacheSnapshot, CacheUpdate, encoder
from .prefix_keys import CacheLayout, number_of, pack


class Follower(Protocol):
    """A gateway, as far as it matters here: a `transport.Connection`, or what stands for one."""

    @property
    def is_congested(self) -> bool: ...

    def send(self, payload: bytes) -> None: ...


class CachePublisher:
    """Belongs to the event loop of an `EngineServer`, which passes on the events of every step.

    Updates are numbered. A gateway that asks gets a snapshot with the number of the last update, and then every
    update. One that does not read fast enough is spared them: it sees the gap by the number, and asks again.
    """

    def __init__(self, core: EngineCore) -> None:
        config = core.scheduler.kv_cache.config
        self._layout = CacheLayout(config.block_size, tuple(group.spec.sliding_window for group in config.groups))
        self._held: set[int] = set()
        self._number = 0
        self._followers: set[Follower] = set()

    def on_events(self, events: Sequence[KVEvent]) -> None:
        """What happened in a step, in order."""
        cleared = False
        changes: dict[int, bool] = {}  # block number -> held; the last word counts
        for event in events:
            if isinstance(event, BlockStored):
                changes[number_of(event.key)] = True
            elif isinstance(event, BlockRemoved):
                changes[number_of(event.key)] = False
            else:
                cleared = True
                self._held.clear()
                changes.clear()
        stored = [number for number, is_held in changes.items() if is_held]
        removed = [number for number, is_held in changes.items() if not is_held]
        self._held.difference_update(removed)
        self._held.update(stored)
        self._number += 1
        if self._followers:
            self._tell(CacheUpdate(self._number, pack(stored), pack(removed), cleared))

    def follow(self, gateway: Follower) -> None:
        """Tell a gateway what is held now, and from now on."""
        self._followers.add(gateway)
        layout = self._layout
        gateway.send(encoder.encode(CacheSnapshot(self._number, layout.block_size, layout.windows, pack(self._held))))

    def unfollow(self, gateway: Follower) -> None:
        self._followers.discard(gateway)

    def _tell(self, update: CacheUpdate) -> None:
        payload = encoder.encode(update)
        for gateway in self._followers:
            if not gateway.is_congested:
                gateway.send(payload)
