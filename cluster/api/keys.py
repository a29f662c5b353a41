"""API keys: a file of tenants, read again when it changes, and the middleware that asks every request for its key.

    tenants:
      - name: team-a
        key_sha256: 8b27b6aa...        # 64 digits
        weight: 2                      # of the engines' time, where tenants compete; 1 when left out
        requests_per_minute: 600       # no limit when left out
        tokens_per_minute: 200000
        min_priority: -10              # 0 when left out
      - name: team-b
        key: [sk-old, sk-new]          # several, while one replaces the other
        admin: true                    # may make faults on purpose, where they are allowed; false when left out

    share_prefix_cache: false          # of tenants with each other: whoever shares can tell what others have asked

YAML or JSON. A key is given itself, or as the SHA-256 of its UTF-8 (`printf %s "$KEY" | sha256sum`), so that the file
needs to hold no secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationError, model_validator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.config import Section
from quire.engine.errors import ConfigError, QuireError

from .errors import AuthenticationError, error_response
from .protocol.scheduling import MAX_PRIORITY
from .tenants import Tenant, Terms, set_tenant

logger = logging.getLogger(__name__)

POLL_S = 1.0  # how often the file's time is looked at
MAX_KEY_CHARS = 512

OPEN_PATHS = frozenset(["/health", "/ready", "/version", "/openapi.json", "/docs", "/docs/oauth2-redirect"])
METRICS_PATH = "/metrics"


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _can_be_sent(key: str) -> str:
    """What a header brings unchanged."""
    if not _PRINTABLE.fullmatch(key):
        raise ValueError("must be printable ASCII without spaces, as no other key can be sent")
    return key


_PRINTABLE = re.compile("[!-~]*")
_Key = Annotated[str, StringConstraints(min_length=8, max_length=MAX_KEY_CHARS), AfterValidator(_can_be_sent)]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class TenantEntry(Section):
    """One tenant of the file."""

    name: str = Field(min_length=1, max_length=128)
    key: Annotated[tuple[_Key, ...], BeforeValidator(_as_list)] = ()
    key_sha256: Annotated[tuple[_Digest, ...], BeforeValidator(_as_list)] = ()
    weight: float = Field(1.0, gt=0, le=1e6)
    requests_per_minute: float | None = Field(None, ge=1)
    tokens_per_minute: float | None = Field(None, ge=1)
    min_priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    admin: bool = False

    @model_validator(mode="after")
    def _has_a_key(self) -> TenantEntry:
        if not self.key and not self.key_sha256:
            raise ValueError("needs a key or a key_sha256")
        return self

    def terms(self, *, shares_cache: bool) -> Terms:
        limits = self.requests_per_minute, self.tokens_per_minute, self.min_priority
        return Terms(self.weight, *limits, shares_cache=shares_cache, is_admin=self.admin)

    def digests(self) -> list[bytes]:
        """SHA-256 of each of its keys."""
        return [_digest(key) for key in self.key] + [bytes.fromhex(each) for each in self.key_sha256]


class KeyFile(Section):
    """What the file holds."""

    tenants: tuple[TenantEntry, ...] = Field(min_length=1)
    share_prefix_cache: bool = False

    @model_validator(mode="after")
    def _told_apart(self) -> KeyFile:
        names, digests = set(), set()
        for tenant in self.tenants:
            if tenant.name in names:
                raise ValueError(f"two tenants are called {tenant.name!r}: give one of them both keys")
            names.add(tenant.name)
            for digest in tenant.digests():
                if digest in digests:
                    raise ValueError(f"tenant {tenant.name!r}: one of its keys is there already")
                digests.add(digest)
        return self


class KeyRing:
    """The tenants of a file by their keys. `follow` keeps it up to date; looking a key up touches no file.

    A table of hashes with a secret of this process finds the tenant: what a stranger sends has no relation to where it
    is looked for, so the time tells nothing. The comparison that decides is in constant time.
    """

    def __init__(self, path: Path, *, num_gateways: Callable[[], int] = lambda: 1) -> None:
        """Reads the file. Raises `ConfigError`."""
        self._path = path
        self._num_gateways = num_gateways
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[str, Tenant] = {}
        self._by_key: dict[bytes, tuple[bytes, Tenant]] = {}
        self._stamp = self._look()
        self._take(read_key_file(path))

    def find(self, key: str) -> Tenant | None:
        """Whose key this is."""
        digest = _digest(key)
        found = self._by_key.get(self._place(digest))
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None

    async def follow(self) -> None:
        """Read the file again whenever it changes, until cancelled. One that cannot be read changes nothing."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the file again if it has changed."""
        try:
            stamp = await asyncio.to_thread(self._look)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._take(await asyncio.to_thread(read_key_file, self._path))
            logger.info("API keys were read again: %d tenants.", len(self._tenants))
        except ConfigError as error:
            logger.error("The API keys stay as they were: %s", error.message)

    def _look(self) -> tuple[int, int, int]:
        """What changes with the file. Raises `ConfigError`."""
        try:
            stat = os.stat(self._path)
        except OSError as error:
            raise ConfigError(f"api.keys_file: {self._path} cannot be read ({error.strerror}).") from error
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _take(self, file: KeyFile) -> None:
        """Tenants that were there keep what they have used so far, whatever their terms are now."""
        tenants: dict[str, Tenant] = {}
        by_key: dict[bytes, tuple[bytes, Tenant]] = {}
        for entry in file.tenants:
            tenant = self._tenants.get(entry.name)
            terms = entry.terms(shares_cache=file.share_prefix_cache)
            if tenant is None:
                tenant = Tenant(entry.name, terms, num_gateways=self._num_gateways)
            else:
                tenant.agree(terms)
            tenants[entry.name] = tenant
            by_key |= {self._place(digest): (digest, tenant) for digest in entry.digests()}
        self._tenants, self._by_key = tenants, by_key

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def read_key_file(path: Path) -> KeyFile:
    """Raises `ConfigError`, which never repeats a key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"api.keys_file: {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(f"{path}{f':{where.line + 1}' if where else ''}: not YAML.") from error
    try:
        return KeyFile.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{message}.") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


class KeyMiddleware:
    """Lets in who has a key, as that key's tenant. Refuses before a byte of the body is read.

    Every path needs one that is not open on purpose; `open_metrics` opens /metrics too. Reading (GET) is not counted
    against the tenant's requests.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, *, open_metrics: bool) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._path(scope) in self._open:
            await self._app(scope, receive, send)
            return
        try:
            set_tenant(scope, self._admitted(Headers(scope=scope).get("authorization"), scope["method"]))
        except QuireError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admitted(self, header: str | None, method: str) -> Tenant:
        return admitted(self._keys, header, counts=method == "POST")

    @staticmethod
    def _path(scope: Scope) -> str:
        """Below where the application is mounted."""
        path: str = scope["path"]
        return path.removeprefix(scope.get("root_path", ""))


def admitted(keys: KeyRing, authorization: str | None, *, counts: bool) -> Tenant:
    """The tenant of an `Authorization` header, for one more request. Raises `AuthenticationError`, `RateLimitError`."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationError("No API key was given: send it as 'Authorization: Bearer KEY'.", None)
    tenant = keys.find(key) if len(key) <= MAX_KEY_CHARS else None
    if tenant is None:
        raise AuthenticationError("The API key is not known here.", "invalid_api_key")
    if counts:
        tenant.admit()
    return tenant
