"""What the HTTP API asks of whatever is behind it. The gateway is one; tests use a fake without Ray.

The API owns text (chat template, tokenization, detokenization, stop strings, shapes); a backend speaks tokens only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.engine.input_processor import InputProcessor
from quire.engine.outputs import EngineOutput, EngineRequest, SchedulerStats


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under its name in the API, with what turns its text into tokens and back."""

    name: str
    input_processor: InputProcessor
    tokenizer: Any  # a fast tokenizer of transformers
    created: int  # seconds since the epoch, for /v1/models

    @property
    def max_model_len(self) -> int:
        """Longest prompt + answer, in tokens."""
        return self.input_processor.max_model_len


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The latest numbers of one engine."""

    engine_id: str
    model: str
    stats: SchedulerStats


class Backend(Protocol):
    """Engines that serve models. Every method is called on the event loop of the API, and none may block it."""

    def models(self) -> Sequence[ServedModel]:
        """The models served here, the default one first. Cheap: called for every request."""
        ...

    def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """Run requests (the choices of one HTTP request); each item is all that arrived since the one before.

        Nothing is submitted before the first `__anext__`. The generator ends by itself once every request has had its
        `finish_reason` or was aborted. Closing or cancelling it earlier aborts the rest, without waiting. Outputs may
        repeat tokens already received (`first_index` tells), and a lost engine is replaced without a word.

        Raises `OverloadedError` or `InvalidRequestError` at the first `__anext__` when an engine refuses, and
        `EngineError` at any time when a request can be completed nowhere; the others are then aborted. An error that
        belongs to one request arrives as its last output, with `finish_reason == "error"` and `error`.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop working on requests (a stop string was found): their generator yields nothing more for them.

        Unknown and finished ids are ignored.
        """
        ...

    async def check_health(self) -> None:
        """Return when at least one engine makes progress. Raises `EngineError`, with the reason, otherwise."""
        ...

    async def stats(self) -> Sequence[EngineStats]:
        """The latest numbers of every engine known here."""
        ...
