"""The models of one gateway: their names and limits at once, their tokenizers when somebody asks for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Mapping, Sequence

from quire.engine.config import GrammarConfig, ModelConfig
from quire.engine.errors import ConfigError, EngineError, ModelNotFoundError
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

from .api.answers import ModelCard
from .api.backend import ServedModel

logger = logging.getLogger(__name__)


class ServedModels:
    """The models that a gateway serves, the default one first. Methods are called on one event loop.

    A model whose tokenizer cannot be loaded concerns nobody who asks for another; it is tried again for each request.
    `grammar_limits` are those of each model's engines, by name.
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        with_priorities: Container[str] = (),
        grammar_limits: Mapping[str, GrammarConfig] | None = None,
    ) -> None:
        """`with_priorities`: names of the models whose engines heed a request's priority."""
        self._created = int(time.time())
        limits = grammar_limits or {}
        self._models = {
            config.name: _Model(
                config, self._created, config.name in with_priorities, limits.get(config.name, GrammarConfig())
            )
            for config in configs
        }

    async def start(self) -> None:
        """Load the first model that can be. Raises `ConfigError`, of the default model, when none can."""
        errors = []
        for model in self._models.values():
            try:
                await model.load()
            except ConfigError as error:
                errors.append(error)
                logger.error("Model %s cannot be served: %s", model.config.name, error.message)
            else:
                return
        raise errors[0]

    def cards(self) -> Sequence[ModelCard]:
        return [model.card() for model in self._models.values()]

    async def load(self, name: str) -> ServedModel:
        """Raises `ModelNotFoundError`, or `EngineError` when the model's files are not what they should be here."""
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(name, list(self._models))
        try:
            return model.served or await model.load()
        except ConfigError as error:
            raise EngineError(f"The model {name!r} cannot be served just now: {error.message}") from error

    def limit(self, max_model_lens: Mapping[str, int]) -> None:
        """Set the longest prompt and answer by model. Those without an engine keep theirs: the next one will be like
        the last."""
        for name, length in max_model_lens.items():
            if name in self._models:
                self._models[name].limit(length)

    def faults(self) -> dict[str, str | None]:
        """By model, why it could not be loaded; None where it could, or where nobody has asked yet."""
        return {name: model.fault for name, model in self._models.items()}


class _Model:
    """One model, loaded or not."""

    def __init__(self, config: ModelConfig, created: int, has_priorities: bool, grammar_limits: GrammarConfig) -> None:
        self.config = config
        self._grammar_limits = grammar_limits
        self.served: ServedModel | None = None
        self.fault: str | None = None
        self._created = created
        self._has_priorities = has_priorities
        self._max_model_len = config.max_model_len
        self._loading = asyncio.Lock()

    def card(self) -> ModelCard:
        return ModelCard(self.config.name, self._created, self._max_model_len)

    def limit(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        if self.served is not None:
            self.served.input_processor.max_model_len = max_model_len

    async def load(self) -> ServedModel:
        """Raises `ConfigError`. Those who ask meanwhile wait for the same."""
        async with self._loading:
            if self.served is None:
                try:
                    served = await asyncio.to_thread(self._read)
                except ConfigError as error:
                    self.fault = error.message
                    raise
                self.served, self.fault = served, None
                self.limit(self._max_model_len or served.info.max_model_len)
            return self.served

    def _read(self) -> ServedModel:
        info = load_model_info(self.config)
        return ServedModel.create(
            info,
            load_tokenizer(info),
            created=self._created,
            config=self.config,
            has_priorities=self._has_priorities,
            grammar_limits=self._grammar_limits,
        )
