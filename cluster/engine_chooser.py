"""Chooses an engine for each request: a policy, and the index of what engines hold where the policy asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.engine.outputs import EngineRequest

from .cache_index import CacheIndex
from .engine_links import EngineLink
from .messages import CacheSnapshot, CacheUpdate, FollowCache
from .prefix_keys import CacheLayout, PromptKeys, unpack
from .router import RoutingPolicy
from .stream_metrics import StreamBook

_LONG_PROMPT = 16_384  # tokens; hashing so many takes more than half a millisecond


class EngineChooser:
    """Follows the prefix caches of the engines on its links, and books its choices. All methods run on one event
    loop."""

    def __init__(self, policy: RoutingPolicy, book: StreamBook | None = None, index: CacheIndex | None = None) -> None:
        self._policy = policy
        self._book = book or StreamBook()
        self._index = index or CacheIndex()

    async def prepare(self, prompt: PromptKeys, links: Sequence[EngineLink]) -> None:
        """Hash a long prompt while others go on. Short ones, and those that nobody asks for, cost nothing here."""
        if prompt.num_tokens >= _LONG_PROMPT and self._compares(links):
            for layout in self._index.layouts():
                await asyncio.to_thread(prompt.of, layout)

    def choose(self, request: EngineRequest, prompt: PromptKeys, links: Sequence[EngineLink]) -> EngineLink:
        """One of `links`, which is not empty. The request counts as sent there from now on."""
        link, num_hit_tokens = self.look(request, prompt, links)
        self._book.routed(link.record.model, len(links), num_hit_tokens)
        link.num_recent += 1
        link.num_recent_tokens += prompt.num_tokens - num_hit_tokens
        if self._compares(links):
            self._index.expect(link.record.engine_id, prompt)
        return link

    def look(self, request: EngineRequest, prompt: PromptKeys, links: Sequence[EngineLink]) -> tuple[EngineLink, int]:
        """The engine that `choose` would choose, and how many tokens of the prompt it has; books nothing."""
        by_id = {link.record.engine_id: link for link in links}
        hits = self._index.hits(prompt, by_id) if self._compares(links) else {}
        snapshots = [link.snapshot(hits.get(engine_id, 0)) for engine_id, link in by_id.items()]
        engine_id = self._policy.choose(request, snapshots)
        return by_id[engine_id], hits.get(engine_id, 0)

    def _compares(self, links: Sequence[EngineLink]) -> bool:
        return self._policy.uses_prefixes and len(links) > 1

    # What happens on the links

    def on_connected(self, link: EngineLink) -> None:
        if self._policy.uses_prefixes:
            link.send(FollowCache())

    def on_message(self, link: EngineLink, message: CacheSnapshot | CacheUpdate) -> None:
        engine_id = link.record.engine_id
        if isinstance(message, CacheSnapshot):
            layout = CacheLayout(message.block_size, message.windows)
            self._index.reset(engine_id, layout, unpack(message.held))
            link.cache_number = message.number
        elif link.cache_number is None:
            return  # a snapshot is on its way that knows better
        elif message.number != link.cache_number + 1:
            self._index.forget(engine_id)
            link.cache_number = None
            link.send(FollowCache())
        else:
            link.cache_number = message.number
            if message.cleared:
                self._index.clear(engine_id)
            self._index.update(engine_id, unpack(message.stored), unpack(message.removed))

    def on_lost(self, link: EngineLink) -> None:
        self._index.forget(link.record.engine_id)
