"""How every gateway comes to know the metrics of all the others, so that one scrape of any of them shows everything.

Each writes its own every few seconds into the key-value store of Ray's GCS, where the directory is, and reads theirs.
Ten kilobytes per gateway and a few calls of half a millisecond: gateways need no connections to each other for it. What
a gateway has left behind that is gone is shown for some seconds more, and then removed by whoever sees it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from prometheus_client.core import Metric

from .directory import DirectoryError, KeyValueStore

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
STALE_S = 4 * PERIOD_S


class _Family(msgspec.Struct, array_like=True):
    name: str
    documentation: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class _Told(msgspec.Struct, array_like=True):
    """What one gateway has written. `at` is seconds since the epoch, by its node's clock."""

    at: float
    families: list[_Family]


_decoder = msgspec.msgpack.Decoder(_Told)


class MetricsExchange:
    """One gateway's part. `own` are its families now; `tell` is given those of all others after each round."""

    def __init__(
        self,
        store: KeyValueStore,
        application: str,
        gateway_id: str,
        own: Callable[[], Sequence[Metric]],
        tell: Callable[[Sequence[Metric]], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._prefix = f"{application}/metrics/"
        self._key = self._prefix + gateway_id
        self._own = own
        self._tell = tell
        self._clock = clock
        self._unreadable: set[str] = set()  # keys that the log has told of

    async def run(self) -> None:
        """Exchange until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(PERIOD_S)

    async def round(self) -> None:
        """Write and read once. A store that cannot be reached leaves everything as it was."""
        told = msgspec.msgpack.encode(_Told(self._clock(), [_family(metric) for metric in self._own()]))
        try:
            self._tell(await asyncio.to_thread(self._exchange, told))
        except DirectoryError as error:
            logger.warning("%s Metrics of other gateways stay as they were.", error.message)

    async def end(self) -> None:
        """Take away what this gateway has written."""
        try:
            await asyncio.to_thread(self._store.delete, self._key)
        except DirectoryError as error:
            logger.warning("%s The metrics of this gateway stay for some seconds.", error.message)

    def _exchange(self, told: bytes) -> list[Metric]:
        self._store.put(self._key, told, overwrite=True)
        found: list[Metric] = []
        for key in sorted(self._store.keys(self._prefix)):
            if key == self._key:
                continue
            payload = self._store.get(key)
            if payload is None:
                continue
            try:
                theirs = _decoder.decode(payload)
            except msgspec.MsgspecError as error:  # of another version, while an update rolls
                if key not in self._unreadable:
                    self._unreadable.add(key)
                    logger.warning("The metrics under %s cannot be read and are left out: %s", key, error)
                continue
            if self._clock() - theirs.at > STALE_S:
                self._store.delete(key)
                continue
            found += [_metric(family) for family in theirs.families]
        return found


def _family(metric: Metric) -> _Family:
    samples = [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples]
    return _Family(metric.name, metric.documentation, metric.type, samples)


def _metric(family: _Family) -> Metric:
    metric: Any = Metric(family.name, family.documentation, family.kind)
    for name, labels, value in family.samples:
        metric.add_sample(name, labels, value)
    return metric  # type: ignore[no-any-return]
