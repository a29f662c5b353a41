"""The Serve deployment `Gateway`: HTTP in, requests to engines out. Stateless but for its open streams; CPU only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from fastapi import FastAPI
from prometheus_client.core import Metric
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from quire.engine.outputs import EngineOutput, EngineRequest

from .api.answers import ModelCard
from .api.app import create_app
from .api.backend import ServedModel
from .api.health import EngineHealth, ModelHealth, ServiceHealth
from .api.keys import KeyRing
from .api.limits import ApiLimits
from .chaos import add_chaos_route
from .config import QuireConfig
from .directory import Directory, EngineRecord, GcsStore
from .engine_client import EngineClient
from .engine_replica import Engine
from .grpc import quire_inference_pb2 as pb
from .grpc.service import InferenceService
from .grpc_listeners import keep_off_the_network
from .logs import configure_logging
from .messages import ResumePoint
from .metrics import EngineStats, GatewayMetrics
from .metrics_exchange import MetricsExchange
from .ray_metrics import RayExporter
from .router import POLICIES
from .served_models import ServedModels
from .sleeping import SleepWatch, serve_states
from .waking import EngineWaker


class EngineBackend:
    """Implements `api.backend.Backend` over the engines of one application. `is_asleep` says of a model without an
    engine whether it is meant to have none now."""

    def __init__(
        self, client: EngineClient, models: ServedModels, is_asleep: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._client = client
        self._models = models
        self._is_asleep = is_asleep

    def models(self) -> Sequence[ModelCard]:
        return self._models.cards()

    async def load(self, model: str) -> ServedModel:
        return await self._models.load(model)

    def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        return self._client.generate(model, requests)

    def abort(self, request_ids: Sequence[str], *, report: bool = False) -> None:
        self._client.abort(request_ids, report=report)

    async def recall(self, key: bytes) -> Sequence[ResumePoint]:
        return await self._client.recall(key)

    def health(self) -> ServiceHealth:
        """Health is forward progress: engines are connected, their step loops advance, and new ones are noticed."""
        engines: dict[str, list[EngineHealth]] = {}
        for link in self._client.links():
            stats = link.stats
            found = EngineHealth(link.record.engine_id, link.problem, stats.num_running, stats.num_waiting)
            engines.setdefault(link.record.model, []).append(found)
        faults = self._models.faults()
        models = [
            ModelHealth(name, engines.get(name, []), fault, is_asleep=self._is_asleep(name))
            for name, fault in faults.items()
        ]
        problem = self._client.problem()
        return ServiceHealth(models, None if problem is None else f"New engines are not noticed: {problem}.")

    async def stats(self) -> Sequence[EngineStats]:
        return [EngineStats(link.record.engine_id, link.record.model, link.stats) for link in self._client.links()]


@serve.ingress()
class Gateway:
    """One gateway. `engines` are the deployments that it depends on, so that Serve starts and ends all together."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: QuireConfig,
        *engines: DeploymentHandle[Engine],
    ) -> None:
        keep_off_the_network()
        context = serve.get_replica_context()
        self._gateway_id = context.replica_id.unique_id
        configure_logging(f"gateway {self._gateway_id}")
        self._config = config.api
        self._metrics = GatewayMetrics(self._gateway_id)
        self._allow_faults = config.allow_faults
        self._world_sizes = {each.model.name: each.parallel.world_size for each in config.engines().values()}
        self._models = ServedModels(
            [engine.model for engine in config.engines().values()],
            [engine.model.name for engine in config.engines().values() if engine.scheduler.policy == "priority"],
            {engine.model.name: engine.grammar for engine in config.engines().values()},
        )
        await self._models.start()
        self._waker = EngineWaker(
            {engine.model.name: handle for engine, handle in zip(config.engines().values(), engines, strict=True)},
            lambda model: self._client.waits_for(model),
        )
        self._client = EngineClient(
            Directory(GcsStore(), context.app_name),
            self._gateway_id,
            POLICIES[config.routing.policy](),
            failover_timeout_s=config.api.failover_timeout_s,
            max_waiting_requests=config.routing.max_waiting_requests,
            on_engines=self._limit_context,
            on_waiting=self._waker.wake,
            on_late_report=self._metrics.reported,
            book=self._metrics.streams,
        )
        self._sleep = SleepWatch(
            {engine.model.name: name for name, engine in config.engines().items()},
            self._models_without_engine,
            partial(serve_states, context.app_name),
        )
        self._backend = EngineBackend(self._client, self._models, self._sleep.is_asleep)
        self._exchange = MetricsExchange(
            GcsStore(), context.app_name, self._gateway_id, self._metrics.families, self._hear_others
        )
        chores = [self._exchange.run(), RayExporter(self._metrics.families).run(), self._sleep.run()]
        self._keys: KeyRing | None = None
        if config.api.keys_file is not None:
            self._keys = KeyRing(config.api.keys_file, num_gateways=self._client.num_gateways)
            chores.append(self._keys.follow())
        await self._client.start()
        self._chores = [asyncio.create_task(chore) for chore in chores]

    def _limit_context(self, engines: Sequence[EngineRecord]) -> None:
        """An engine whose cache is small serves less than the model could: refuse here what all of them would."""
        lengths: dict[str, int] = {}
        for engine in engines:
            lengths[engine.model] = max(engine.max_model_len, lengths.get(engine.model, 0))
        self._models.limit(lengths)

    def _models_without_engine(self) -> list[str]:
        served = {link.record.model for link in self._client.links()}
        return [name for name in self._models.faults() if name not in served]

    def _hear_others(self, families: Sequence[Metric]) -> None:
        self._metrics.others = families

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(
            self._backend,
            metrics=self._metrics,
            limits=ApiLimits(**self._config.model_dump(include=set(ApiLimits.__slots__))),
            keys=self._keys,
            open_metrics=self._config.open_metrics,
            allowed_origins=self._config.allowed_origins,
            request_ids=False,
        )
        if self._allow_faults:
            add_chaos_route(app, self._client.links, self._world_sizes)
        self._inference = InferenceService(app)
        return app

    # The methods of proto/quire_inference.proto, which Serve calls by their names.

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with aclosing(self._inference.generate(request, grpc_context)) as responses:
            async for response in responses:
                yield response

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        return await self._inference.tokenize(request, grpc_context)

    async def Health(self, request: pb.HealthRequest, grpc_context: RayServegRPCContext) -> pb.HealthResponse:
        return await self._inference.health(request, grpc_context)

    async def __del__(self) -> None:
        """Called by Serve when it stops the replica."""
        for chore in getattr(self, "_chores", ()):
            chore.cancel()
        if hasattr(self, "_exchange"):
            await self._exchange.end()
        if hasattr(self, "_client"):
            await self._client.close()
            self._waker.close()
