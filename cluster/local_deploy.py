"""Serve and the application on the private Ray of `quire serve`: started, and waited for, but not for ever.

    Serve's controller  -->  HTTP proxies  -->  both are waited for
                        -->  deployments

Imports Ray: after its environment is set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, gRPCOptions

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError

from . import placement
from .config import GRPC_SERVICER
from .config_file import ServiceConfig
from .placement import PlacementPlan
from .serve_api import last_error

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

POLL_S = 0.05
LOOK_S = 0.25  # for Serve to say how an application is takes 12 ms of a core, which the engine that starts could use
PROXIES_S = 15.0  # for Serve's start to end, when nobody wants it any more
GRACE_S = 20.0  # for an engine that gives up in time to say why


@contextmanager
def serve_starts(service: ServiceConfig) -> Iterator[None]:
    """Serve's own start, in a thread. Inside, there is a controller, which can deploy; behind, the HTTP proxies are
    ready. Raises `EngineError` where they cannot start, or what is inside finds that."""
    ready: Future[None] = Future()
    thread = threading.Thread(target=_start_serve, args=(service, ready), name="Serve's start", daemon=True)
    try:
        thread.start()
        while not ready.done() and not serve.status().proxies:
            time.sleep(POLL_S)
        if ready.done():
            ready.result()
        yield
        ready.result()
    except (RayError, TimeoutError) as error:
        last_line = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise EngineError(f"Serve could not start: {last_line}") from error
    finally:
        thread.join(PROXIES_S)  # or Ray, shut down below a thread that waits for it, may end the process


def _start_serve(service: ServiceConfig, ready: Future[None]) -> None:
    try:
        serve.start(http_options=HTTPOptions(host=service.host, port=service.port), grpc_options=_grpc_options(service))
    except BaseException as error:
        ready.set_exception(error)
    else:
        ready.set_result(None)


def _grpc_options(service: ServiceConfig) -> gRPCOptions | None:
    if service.grpc_port is None:
        return None
    return gRPCOptions(port=service.grpc_port, grpc_servicer_functions=[GRPC_SERVICER])


def deploy(service: ServiceConfig) -> None:
    """Have Serve start all deployments. Raises `ConfigError` when this machine has not what they ask for."""
    from .app import bind

    check_room(service, placement.live_nodes())
    application = bind(service.quire, service.deployments)
    target = serve.RunTarget(application, name=service.application, route_prefix=service.route_prefix)
    serve.run_many([target], wait_for_applications_running=False)


def wait_until_ready(service: ServiceConfig) -> None:
    """Wait for all deployments.

    Raises `EngineError` when one of them fails, or is not ready in the longest `parallel.startup_timeout_s` of all
    engines.
    """
    timeout_s = max(engine.parallel.startup_timeout_s for engine in service.quire.engines().values())
    wait_until_running(lambda: serve.status().applications.get(service.application), timeout_s)


def wait_until_running(
    look: Callable[[], ApplicationStatusOverview | None],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """`look` says how the application is. Raises `EngineError` with what its deployments say."""
    deadline = clock() + timeout_s + GRACE_S
    while True:
        status = look()
        if status is not None and status.status == "RUNNING":
            return
        if status is not None and status.status == "DEPLOY_FAILED":
            raise EngineError(f"The service could not start. {_said(status)}")
        if clock() > deadline:
            said = _said(status) if status else "Serve says nothing of it."
            raise EngineError(f"The service is not ready after {timeout_s + GRACE_S:g} s. {said}")
        sleep(LOOK_S)


def _said(status: ApplicationStatusOverview) -> str:
    """What the deployments that are not healthy say, else what Serve says of the application."""
    waiting = {name: each for name, each in status.deployments.items() if each.status != "HEALTHY"}
    said = [f"{name}: {last_error(each.message)}" for name, each in waiting.items() if each.message]
    if not said and waiting:
        said = [f"{name} has not started." for name in waiting]
    return " ".join(said) or last_error(status.message)


def check_room(service: ServiceConfig, nodes: list[Mapping[str, float]]) -> None:
    """Whether all engines that start at once, and their ranks, fit on the nodes together: a private cluster does not
    grow.

    Raises `ConfigError` that says what is missing and what is there.
    """
    from .app import settled

    free = [dict(node) for node in nodes]
    for name, engine in service.quire.engines().items():
        options = service.deployments.get(name, {})
        plans = list(_plans(settled(engine), options.get("ray_actor_options")))
        for plan in plans * _num_at_once(options):
            if not placement.take(plan, free):
                raise ConfigError(f"{name} has no place here: {placement.explain_shortage(plan, nodes)}")


def _num_at_once(options: Mapping[str, Any]) -> int:
    """Engines that a deployment with these options begins with; one for those that come later, too."""
    scaling = options.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        return max(1, int(scaling.get("initial_replicas") or scaling.get("min_replicas", 1)))
    given = options.get("num_replicas")
    return given if isinstance(given, int) else 1


def _plans(engine: EngineConfig, actor_options: Mapping[str, Any] | None) -> Iterator[PlacementPlan]:
    from .app import engine_actor_options

    asked: Mapping[str, Any] = engine_actor_options(engine) if actor_options is None else actor_options
    named: dict[str, Any] = {"CPU": asked.get("num_cpus"), "GPU": asked.get("num_gpus")}
    named |= asked.get("resources") or {}
    needed = {resource: float(amount) for resource, amount in named.items() if amount}
    if needed:
        yield PlacementPlan((needed,))
    if engine.parallel.world_size > 1:
        yield placement.plan_ranks(engine.parallel, on_gpu=engine.model.device == "cuda")
