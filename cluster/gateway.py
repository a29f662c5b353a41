"""The Serve deployment `Gateway`: HTTP in, requests to engines out. Stateless but for its open streams; CPU only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from quire.engine.errors import EngineError
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineOutput, EngineRequest
from quire.engine.tokenizer import load_tokenizer

from .api.app import create_app
from .api.backend import ServedModel
from .api.context import ApiLimits
from .config import QuireConfig
from .directory import Directory, EngineRecord, GcsStore
from .engine_client import EngineClient
from .engine_replica import Engine
from .logs import configure_logging
from .metrics import EngineStats, GatewayMetrics
from .router import LeastLoaded


class EngineBackend:
    """Implements `api.backend.Backend` over the engines of one application."""

    def __init__(self, client: EngineClient, models: Sequence[ServedModel]) -> None:
        self._client = client
        self._models = models

    def models(self) -> Sequence[ServedModel]:
        return self._models

    def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        return self._client.generate(model, requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._client.abort(request_ids)

    async def check_health(self) -> None:
        """Health is forward progress: an engine is connected, its step loop advances, and new engines are noticed."""
        problem = self._client.problem()
        if problem is not None:
            raise EngineError(f"New engines are not noticed: {problem}.")
        links = self._client.links()
        if not links:
            raise EngineError("No engine is connected.")
        problems = [f"{link.record.engine_id}: {link.problem}" for link in links if link.problem is not None]
        if len(problems) == len(links):
            raise EngineError(f"No engine makes progress. {'; '.join(problems)}")

    async def stats(self) -> Sequence[EngineStats]:
        return [EngineStats(link.record.engine_id, link.record.model, link.stats) for link in self._client.links()]


@serve.ingress()
class Gateway:
    """One gateway. `engine` is the deployment that it depends on, so that Serve starts and ends both together."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: QuireConfig,
        engine: DeploymentHandle[Engine],  # noqa: ARG002
    ) -> None:
        context = serve.get_replica_context()
        self._gateway_id = context.replica_id.unique_id
        configure_logging(f"gateway {self._gateway_id}")
        self._limits = ApiLimits(config.api.max_body_bytes, config.api.max_choices)
        info = load_model_info(config.model)
        self._model = ServedModel.create(info, load_tokenizer(info))
        self._client = EngineClient(
            Directory(GcsStore(), context.app_name),
            self._gateway_id,
            LeastLoaded(),
            failover_timeout_s=config.api.failover_timeout_s,
            on_engines=self._limit_context,
        )
        self._backend = EngineBackend(self._client, [self._model])
        await self._client.start()

    def _limit_context(self, engines: Sequence[EngineRecord]) -> None:
        """An engine whose cache is small serves less than the model could: refuse here what all of them would refuse.

        While none is there, the limit stays: the next one will be like the last.
        """
        lengths = [engine.max_model_len for engine in engines if engine.model == self._model.name]
        processor = self._model.input_processor
        processor.max_model_len = max(lengths, default=processor.max_model_len)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._backend, metrics=GatewayMetrics(self._gateway_id), limits=self._limits, request_ids=False
        )

    async def __del__(self) -> None:
        """Called by Serve when it stops the replica."""
        if hasattr(self, "_client"):
            await self._client.close()
