"""What the HTTP API asks of whatever is behind it. The gateway is one; tests use a fake without Ray.

The API owns text (chat template, tokenization, detokenization, stop strings, shapes); a backend speaks tokens only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.engine.config import GrammarConfig, ModelConfig
from quire.engine.detokenizer import TokenDecoder
from quire.engine.input_processor import InputProcessor
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import EngineOutput, EngineRequest

from ..messages import ResumePoint
from ..metrics import EngineStats
from .answers import ModelCard
from .chat_style import ChatStyle
from .health import ServiceHealth


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under its name in the API, with what turns its text into tokens and back."""

    info: ModelInfo
    tokenizer: Any  # a fast tokenizer of transformers
    input_processor: InputProcessor
    token_decoder: TokenDecoder
    created: int  # seconds since the epoch, for /v1/models
    chat: ChatStyle
    has_priorities: bool = False  # its engines heed `priority` (scheduler policy "priority")
    grammar_limits: GrammarConfig = GrammarConfig()  # noqa: RUF009 - it is immutable

    @classmethod
    def create(
        cls,
        info: ModelInfo,
        tokenizer: Any,
        *,
        created: int | None = None,
        config: ModelConfig | None = None,
        has_priorities: bool = False,
        grammar_limits: GrammarConfig | None = None,
    ) -> ServedModel:
        """A model served from now on, or from `created`. Raises `ConfigError` when its chat template is not there."""
        when = int(time.time()) if created is None else created
        chat = ChatStyle.of(tokenizer, config)
        return cls(
            info,
            tokenizer,
            InputProcessor(info, tokenizer),
            TokenDecoder(tokenizer),
            when,
            chat,
            has_priorities,
            grammar_limits or GrammarConfig(),
        )

    @property
    def name(self) -> str:
        return self.info.name

    def card(self) -> ModelCard:
        return ModelCard(self.name, self.created, self.input_processor.max_model_len)


class Backend(Protocol):
    """Engines that serve models. Every method is called on the event loop of the API, and none may block it."""

    def models(self) -> Sequence[ModelCard]:
        """The models served here, the default one first. Cheap: called for every request."""
        ...

    async def load(self, model: str) -> ServedModel:
        """One of `models()`; its first user may have to wait for its tokenizer. Raises `EngineError` with the reason
        when that cannot be loaded."""
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

    def abort(self, request_ids: Sequence[str], *, report: bool = False) -> None:
        """Stop working on requests (a stop string was found): their generator yields nothing more for them.

        With `report` it yields one more output for each, with finish reason "abort" and the report of its engine,
        unless that is lost before. Unknown and finished ids are ignored.
        """
        ...

    async def recall(self, key: bytes) -> Sequence[ResumePoint]:
        """What engines remember of the answers to a request (`ResumeTag.key`), perhaps several times of one, and this
        gateway of those that had no engine. They stop working on what they still do, and go on remembering. Takes as
        long as the slowest of them, within seconds."""
        ...

    def health(self) -> ServiceHealth:
        """Whether the engines make progress, model by model."""
        ...

    async def stats(self) -> Sequence[EngineStats]:
        """The latest numbers of every engine known here."""
        ...
