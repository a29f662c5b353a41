"""The fields of every request that engines work on: what it is to the scheduler, and who calls it what."""

from __future__ import annotations

import re
import uuid

from quire.engine.errors import InvalidRequestError
from quire.engine.input_processor import RequestOptions

from .fields import StrictModel

MAX_PRIORITY = 1_000_000
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 256
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_SHOWN_CHARS = 80


class ScheduledRequest(StrictModel):
    """What requests share that generate and those that embed."""

    model: str
    request_id: str | None = None
    session_id: str | None = None
    prompt_cache_key: object | None = None  # OpenAI's names for what may serve as a session; any value is accepted
    user: object | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None

    def ids(self, prefix: str) -> tuple[str, str]:
        """The id of the answer, which begins with `prefix`, and that of its first engine request, which must be unique
        while the user's own may not be. Raises `InvalidRequestError`."""
        drawn = uuid.uuid4().hex
        if self.request_id is None:
            return f"{prefix}{drawn}", f"{prefix}{drawn}"
        if not _REQUEST_ID.fullmatch(self.request_id):
            raise InvalidRequestError(
                "request_id: must be 1 to 128 printable ASCII characters without spaces, got "
                f"{self.request_id[:_SHOWN_CHARS]!r}.",
                "request_id",
            )
        return f"{prefix}{self.request_id}", f"{prefix}{self.request_id}-{drawn}"

    def options(self) -> RequestOptions:
        """What the scheduler is told. Raises `InvalidRequestError`."""
        priority = 0 if self.priority is None else self.priority
        if abs(priority) > MAX_PRIORITY:
            limits = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise InvalidRequestError(f"priority: must be an integer {limits}, got {priority}.", "priority")
        if self.deadline_ms is not None and not 1 <= self.deadline_ms <= MAX_DEADLINE_MS:
            limits = f"from 1 to {MAX_DEADLINE_MS}"
            raise InvalidRequestError(
                f"deadline_ms: must be an integer {limits}, got {self.deadline_ms}.", "deadline_ms"
            )
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt: must have 1 to {MAX_SALT_CHARS} characters, got {len(self.cache_salt)}.", "cache_salt"
            )
        if self.session_id is not None and not 1 <= len(self.session_id) <= MAX_SESSION_CHARS:
            raise InvalidRequestError(
                f"session_id: must have 1 to {MAX_SESSION_CHARS} characters, got {len(self.session_id)}.", "session_id"
            )
        return RequestOptions(
            priority=priority,
            deadline_ms=self.deadline_ms,
            cache_salt=self.cache_salt,
            session_id=self.session_id or _session(self.prompt_cache_key) or _session(self.user),
        )


def _session(label: object) -> str | None:
    """A label as what requests may have in common; None for one that cannot be meant so."""
    return label if isinstance(label, str) and 1 <= len(label) <= MAX_SESSION_CHARS else None
