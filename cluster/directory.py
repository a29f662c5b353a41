"""Which engines exist: one entry per engine in the key-value store of Ray's GCS.

Three places were weighed. A deployment actor of Serve can be looked up only by replicas of its own deployment, and
engines and gateways are two; a named actor (or a deployment) is one more process to start, and to lose. The GCS is
there already, lives as long as the cluster, and an entry costs half a millisecond. It has no notification, so gateways
list the keys every `POLL_S`; what an entry says of an engine never changes, so that a poll without news is one small
call. How loaded an engine is does not pass through here: every gateway holds a connection to every engine, and hears it
there at once. The same connection tells of an engine's death.

What is left behind in the store is removed by whoever finds nobody at home, and where nobody can be asked (the node has
vanished from the network), by whoever sees that the entry is not renewed any more (`Lease`). Who removes one by mistake
does little harm: an engine writes its entry again every `REGISTER_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from ray.exceptions import RaySystemError, RpcError
from ray.experimental import internal_kv

from quire.engine.errors import QuireError

from .transport import new_secret

logger = logging.getLogger(__name__)

POLL_S = 0.25
REGISTER_S = 3.0
LEASE_S = 12.0  # an engine that has not renewed its entry for so long is not there any more


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, from its start to its end: an engine that starts again is another one."""

    engine_id: str
    model: str  # name in the API
    host: str
    port: int
    max_model_len: int
    renewal: int = 0  # counts how often the engine has written this entry again


class DirectoryError(QuireError):
    """The store cannot be reached just now."""


class KeyValueStore(Protocol):
    """The part of a key-value store that the directory needs. Calls may block, and raise `DirectoryError`."""

    def put(self, key: str, value: bytes, *, overwrite: bool) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def keys(self, prefix: str) -> list[str]: ...

    def delete(self, key: str) -> None: ...


class GcsStore:
    """The key-value store of the Ray cluster that this process is connected to."""

    _NAMESPACE = "quire"

    def put(self, key: str, value: bytes, *, overwrite: bool) -> None:
        with _reaching_the_gcs():
            internal_kv._internal_kv_put(key, value, overwrite, namespace=self._NAMESPACE)

    def get(self, key: str) -> bytes | None:
        with _reaching_the_gcs():
            value: bytes | None = internal_kv._internal_kv_get(key, namespace=self._NAMESPACE)
        return value

    def keys(self, prefix: str) -> list[str]:
        with _reaching_the_gcs():
            return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=self._NAMESPACE)]

    def delete(self, key: str) -> None:
        with _reaching_the_gcs():
            internal_kv._internal_kv_del(key, namespace=self._NAMESPACE)


@contextmanager
def _reaching_the_gcs() -> Iterator[None]:
    try:
        yield
    except (RaySystemError, RpcError) as error:
        raise DirectoryError(f"The directory of engines cannot be reached ({error}).") from error


class Directory:
    """The engines of one application, and the secret that its processes share."""

    def __init__(self, store: KeyValueStore, application: str) -> None:
        self._store = store
        self._engines = f"{application}/engines/"
        self._secret = f"{application}/secret"

    def secret(self) -> bytes:
        """The application's shared secret: the first process to ask makes it.

        It lies in the GCS because whoever can read there can already run code in this cluster.
        """
        self._store.put(self._secret, new_secret(), overwrite=False)
        secret = self._store.get(self._secret)
        assert secret is not None
        return secret

    def register(self, record: EngineRecord) -> None:
        self._store.put(self._engines + record.engine_id, msgspec.msgpack.encode(record), overwrite=True)

    def remove(self, engine_id: str) -> None:
        """Forget an engine. Harmless for one that is not there."""
        self._store.delete(self._engines + engine_id)

    def engine_ids(self) -> list[str]:
        """The ids of all engines, in order."""
        return sorted(key.removeprefix(self._engines) for key in self._store.keys(self._engines))

    def get(self, engine_id: str) -> EngineRecord | None:
        data = self._store.get(self._engines + engine_id)
        return None if data is None else msgspec.msgpack.decode(data, type=EngineRecord)


class Lease:
    """How long one observer goes on believing in an engine that it cannot reach.

    The engine's clock is never compared with the observer's: an entry carries no time, only a count that grows. The
    lease runs from the moment at which this observer first saw the latest count, by its own monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._renewal: int | None = None
        self._seen_at = clock()

    def has_run_out(self, renewal: int) -> bool:
        """`renewal` is what the entry says now."""
        if renewal != self._renewal:
            self._renewal, self._seen_at = renewal, self._clock()
        return self._clock() - self._seen_at > LEASE_S


class Registration:
    """An engine's entry in the directory for as long as the engine lives."""

    def __init__(self, directory: Directory, record: EngineRecord) -> None:
        self._directory = directory
        self._record = record
        self._leaving = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write the entry, and again every `REGISTER_S`. Raises `DirectoryError`."""
        await asyncio.to_thread(self._directory.register, self._record)
        self._keeper = asyncio.create_task(self._keep())

    async def end(self) -> None:
        """Remove the entry, and do not write it again."""
        self._leaving.set()
        if self._keeper is not None:
            await self._keeper  # not cancelled: a write that is under way in a thread must not come after the removal
        await asyncio.to_thread(self._directory.remove, self._record.engine_id)

    async def _keep(self) -> None:
        while not self._leaving.is_set():
            try:
                async with asyncio.timeout(REGISTER_S):
                    await self._leaving.wait()
            except TimeoutError:
                await self._renew()

    async def _renew(self) -> None:
        self._record = msgspec.structs.replace(self._record, renewal=self._record.renewal + 1)
        try:
            await asyncio.to_thread(self._directory.register, self._record)
        except DirectoryError as error:
            logger.warning("%s", error.message)
