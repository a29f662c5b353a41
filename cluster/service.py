"""`quire serve`: a service on this machine, from nothing to its first answer, and back to nothing.

It runs on a private Ray that starts and ends with it; whatever else runs on this machine is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError
from quire.engine.model_source import load_model_info
from quire.workers.models.sizes import check_ranks

from .config import override
from .config_file import ServiceConfig, load_service
from .haproxy_tier import haproxy_launcher
from .ray_local import LOOPBACK, LocalRay, environment, make_folder, remove_folder

logger = logging.getLogger(__name__)

MIN_MEMORY_BYTES = 2 << 30  # Ray and Serve take 1.2 GiB before the model has any
STOP_TIMEOUT_S = 5.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ready:
    """A service that has just given its first answer."""

    url: str
    models: list[str]
    seconds: dict[str, float]  # how long each part of the start took, in order

    @property
    def curl(self) -> str:
        body = {"model": self.models[0], "messages": [{"role": "user", "content": "Hello!"}]}
        return f"curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def serve(
    config: Path | None = None,
    *,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    host: str | None = None,
    port: int | None = None,
    grpc_port: int | None = None,
    dashboard: bool = False,
    on_ready: Callable[[Ready], None] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises `QuireError`, in one line, when the service cannot start.

    `config` is a Ray Serve config file; the other values override what it says.
    """
    service = ServiceConfig() if config is None else load_service(config)
    service = replace(
        service,
        quire=override(service.quire, overrides or {}),
        host=host or service.host,
        port=port or service.port,
        grpc_port=grpc_port or service.grpc_port,
    )
    clock = _Clock()
    models = _check(service)
    clock.lap("checks")
    with _ended_by_signals(), _private_folder() as folder, _owning_all_descendants():
        ray = _start(service, folder, clock, dashboard=dashboard)
        try:
            _first_answers(service, models)
            clock.lap("first answer")
            (on_ready or _print_ready)(Ready(_url(service), models, clock.laps))
            while True:
                signal.pause()
        finally:
            ray.stop()


def _print_ready(ready: Ready) -> None:
    parts = " · ".join(f"{name} {seconds:.1f} s" for name, seconds in ready.seconds.items())
    models, seconds = ", ".join(ready.models), sum(ready.seconds.values())
    print(f"Quire serves {models} at {ready.url}/v1 after {seconds:.1f} s ({parts})")
    print(f"\n  {ready.curl}\n\nCtrl-C ends it.", flush=True)


# Before anything is started


def _check(service: ServiceConfig) -> list[str]:
    """The models' names, after what can be known without starting anything. Raises `ConfigError`."""
    models = [_check_model(engine) for engine in service.quire.engines().values()]
    _check_port(service.host, service.port, "port")
    if service.grpc_port is not None:
        if service.grpc_port == service.port:
            raise ConfigError(f"grpc-port: {service.port} is the port of HTTP; choose another with --grpc-port.")
        _check_port(service.host, service.grpc_port, "grpc-port")
    available = psutil.virtual_memory().available
    if available < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"Too little memory: {available >> 20} MiB are available, at least {MIN_MEMORY_BYTES >> 20} MiB are needed."
        )
    return models


def _check_port(host: str, port: int, option: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{option}: cannot listen on {host}:{port} ({error.strerror}); choose another with --{option}."
            ) from error


def _check_model(engine: EngineConfig) -> str:
    info = load_model_info(engine.model)
    check_ranks(engine, info)
    return info.name


# The start


def _start(service: ServiceConfig, folder: Path, clock: _Clock, *, dashboard: bool) -> LocalRay:
    """Ray, Serve, and the application's deployments, all of them ready."""
    ports = [port for port in (service.port, service.grpc_port) if port is not None]
    haproxy = haproxy_launcher(folder, service.host, ports)
    # Behind HAProxy nothing of Serve is for anybody but HAProxy.
    behind = service if haproxy is None else replace(service, host=LOOPBACK)
    grpc_host = None if service.grpc_port is None else behind.host
    if haproxy is None:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"  # Serve would start one by itself, open to everybody
        logger.info("Serve's own proxy is the HTTP tier.")
    os.environ.update(environment(folder, haproxy=haproxy, grpc_host=grpc_host))
    local: LocalRay | None = None
    try:
        with _signals_wait():  # whoever leaves Ray while it connects ends in a crash
            local = LocalRay.start(folder, dashboard=dashboard)
        clock.lap("Ray")
        from .local_deploy import deploy, serve_starts, wait_until_ready  # Ray, now that its environment is set

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with serve_starts(behind):
            deploy(service)
        clock.lap("Serve")
        wait_until_ready(service)
        clock.lap("model")
    except BaseException:
        if local is not None:
            local.stop()
        raise
    return local


def _first_answers(service: ServiceConfig, models: list[str]) -> None:
    """Wait until every model has given its first token, by what /ready says at the front door. Raises `EngineError`."""
    timeout_s = service.quire.api.failover_timeout_s
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{_url(service)}/ready", timeout=timeout_s) as response:
                missing = sorted(set(models) - set(json.load(response)["models"]))
            if not missing:
                return
            problem = f"no token yet from {', '.join(missing)}"
        except urllib.error.HTTPError as error:
            problem = f"{error.code}: {error.read().decode(errors='replace')[:200]}"
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise EngineError(f"The service has started but does not answer ({problem}).")
        time.sleep(POLL_S)


def _url(service: ServiceConfig) -> str:
    host = "127.0.0.1" if service.host in ("0.0.0.0", "") else service.host
    return f"http://{host}:{service.port}{service.route_prefix.rstrip('/')}"


class _Clock:
    """Seconds of each part of the start."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now
        logger.info("%s: %.1f s", name, self.laps[name])


# The end


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last when its terminal is closed


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled like Ctrl-C."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block, whatever it is doing; a second one during the clean-up is ignored.

    SIGHUP is not listened to where it is ignored, as below nohup.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _listen_to_signals()
    try:
        yield
    except Stopped:
        logger.info("Stopped.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """The first Ctrl-C that comes inside is obeyed behind the block; a second one at once, wherever it is.

    For SIGTERM, Ray puts a handler of its own in place, which ends the process: ours is back behind the block.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            _stop(number, frame)
        came.append(number)
        logger.warning("Ends when Ray has started; Ctrl-C again ends it now.")

    for number in _heeded():
        signal.signal(number, note)
    try:
        yield
    finally:
        _listen_to_signals()
    if came:
        _stop(came[0], None)


def _listen_to_signals() -> None:
    for number in _heeded():
        signal.signal(number, _stop)


def _heeded() -> list[signal.Signals]:
    """Shells have what they start in the background ignore SIGINT; whoever sends it none the less means it."""
    return [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


@contextlib.contextmanager
def _owning_all_descendants() -> Iterator[None]:
    """Whatever was started inside ends with the block, also what its own parent has left behind."""
    before = {process.pid for process in psutil.Process().children()}
    if sys.platform == "linux":
        adopt_orphans = 36  # PR_SET_CHILD_SUBREAPER, see prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(adopt_orphans, 1, 0, 0, 0)
    try:
        yield
    finally:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=0.5)
            if not left or time.monotonic() > deadline:
                break


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = make_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)
