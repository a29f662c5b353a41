"""The Serve application: `import_path: quire.cluster.app:build`.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to know the type of `args`, and it
must find the class there, not its name.
"""

from collections.abc import Mapping
from typing import Any, cast

from ray import serve
from ray.serve import Application, Deployment

from quire.engine.config import EngineConfig

from .config import GATEWAY, QuireConfig
from .engine_replica import Engine
from .gateway import Gateway
from .placement import CPU_PER_RANK, auto_device

# Serve's own defaults are meant for short calls; a gateway holds streams that last minutes. Requests queue in the
# engines, which know what they can hold, so that neither Serve nor its proxy has to refuse any.
GATEWAY_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 1024,
    "max_queued_requests": -1,
    "ray_actor_options": {"num_cpus": 0.1},
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_timeout_s": 600.0,  # a gateway that is not needed any more has the time of a long stream
    "graceful_shutdown_wait_loop_s": 0.2,
}
ENGINE_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    # What runs in an engine that stops moves to others at once. Where there is none, it goes on until a replacement is
    # there: as long as one takes to start, where there is room for it next to the old one.
    "graceful_shutdown_timeout_s": 20.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "max_constructor_retry_count": 1,  # what keeps an engine from starting does not go away by itself
}

# A step on CPU lasts a millisecond per token of prompt or so, during which nobody else's answer goes on: with 512, the
# mean time to the first token of 32 simultaneous prompts of 128 is 0.78 s, with 2048 1.38 s, at the same tokens per
# second (bfloat16).
CPU_STEP_TOKENS = 512


def build(args: QuireConfig) -> Application:
    """The deployments `Gateway` and one `Engine` per model. A config file's `deployments:` overrides their options."""
    return bind(args, {})


def bind(args: QuireConfig, options: Mapping[str, Mapping[str, Any]]) -> Application:
    """The same with Serve's options by deployment name, over those that are set here."""
    engines = [
        _bind_engine(name, config, options.get(name, {}), args.allow_faults) for name, config in args.engines().items()
    ]
    gateway_options = {**GATEWAY_OPTIONS, **options.get(GATEWAY, {})}
    return _deployment(Gateway).options(name=GATEWAY, **gateway_options).bind(args, *engines)


def _bind_engine(name: str, engine: EngineConfig, options: Mapping[str, Any], allow_faults: bool) -> Application:
    config = settled(engine)
    options = {"ray_actor_options": engine_actor_options(config), **ENGINE_OPTIONS, **options}
    return _deployment(Engine).options(name=name, **options).bind(config, allow_faults=allow_faults)


def settled(engine: EngineConfig) -> EngineConfig:
    """`device: auto` settled by what the cluster has, and with it the size of a step that nobody chose. Here and not in
    the actor, which sees a GPU only if it asks for one."""
    model, scheduler = engine.model, engine.scheduler
    if model.device == "auto":
        model = model.model_copy(update={"device": auto_device(engine.parallel.world_size)})
    if model.device == "cpu" and "max_num_batched_tokens" not in scheduler.model_fields_set:
        scheduler = scheduler.model_copy(update={"max_num_batched_tokens": CPU_STEP_TOKENS})
    return engine.model_copy(update={"model": model, "scheduler": scheduler})


def engine_actor_options(config: EngineConfig) -> dict[str, float]:
    """What the engine's own actor needs. With several ranks, it computes nothing itself."""
    options = {"num_cpus": CPU_PER_RANK if config.parallel.world_size == 1 else 0.1}
    if config.model.device == "cuda" and config.parallel.world_size == 1:
        options["num_gpus"] = 1
    return options


def _deployment(cls: type) -> Deployment:
    return cast(Deployment, serve.deployment(cls))
