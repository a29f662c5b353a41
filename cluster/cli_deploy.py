"""`quire deploy`: a config file onto a running cluster, watched until it serves or it is known why it does not."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from quire.engine.errors import QuireError

from .config_file import ServiceConfig, load_service
from .serve_api import ApplicationView, DeploymentView, ReplicaView, ServeApi

POLL_S = 0.5
LOG_LINES = 15


class DeployError(QuireError):
    """The service does not run, with the reason; `logs` are the last lines of what its replicas wrote."""

    def __init__(self, message: str, logs: list[str]) -> None:
        super().__init__(message)
        self.logs = logs


def deploy(path: Path, address: str, *, timeout_s: float, wait: bool = True) -> None:
    """Deploy a config file and print what becomes of it. Raises `QuireError` when it does not run in time."""
    service = load_service(path)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    with ServeApi(address) as api:
        before = api.look().applications.get(service.application)
        api.deploy(config)
        _warn_of_other_http_options(api.look().http_options, service)
        if not wait:
            print(f"Submitted to {api.address}. Watch it with: quire status --address {api.address}")
            return
        watch = Watch(api, service.application, before.last_deployed_time_s if before else 0.0)
        started = time.monotonic()
        try:
            with _progress() as show:
                application = watch.until_running(timeout_s, show)
        except DeployError as error:
            print(*error.logs, sep="\n", file=sys.stderr)
            raise
        parts = ", ".join(f"{each.name} {each.num_running}" for each in application.deployments)
        models = ", ".join(engine.model.name for engine in service.quire.engines().values())
        print(f"Quire serves {models} after {time.monotonic() - started:.1f} s (replicas: {parts}).")
        url = public_url(api, service)
        print(f"\n  {url}/v1")
        if urlsplit(url).hostname in ("127.0.0.1", "localhost"):
            print(f"\nThat is on the cluster's head. Elsewhere: ray attach CLUSTER.yaml --port-forward {service.port}")


@dataclass
class Watch:
    """Follows one application from its deployment at `since_s` (Serve's clock) on."""

    api: ServeApi
    application: str
    since_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _replicas: dict[str, ReplicaView] = field(default_factory=dict)  # the latest of each deployment

    def until_running(self, timeout_s: float, show: Callable[[ApplicationView], object]) -> ApplicationView:
        """Calls `show` with what there is to see. Raises `DeployError`.

        A deployment that Serve calls unhealthy may get well again; only what it calls failed is given up.
        """
        deadline = self.clock() + timeout_s
        latest: ApplicationView | None = None
        while True:
            cluster = self.api.look()
            found = cluster.applications.get(self.application)
            if found is not None and found.last_deployed_time_s > self.since_s:
                latest = found
                self._remember(found)
                show(found)
                if found.status == "RUNNING" and cluster.proxy_problem is None:
                    return found
                if found.status == "DEPLOY_FAILED":
                    raise DeployError(f"The service could not start. {found.reason}", self._logs(found))
            if self.clock() > deadline:
                problem = _not_in_time(self.application, timeout_s, latest, cluster.proxy_problem)
                raise DeployError(problem, self._logs(latest))
            self.sleep(POLL_S)

    def _remember(self, application: ApplicationView) -> None:
        """Replicas that fail are soon forgotten by Serve, and their logs with them."""
        for deployment in application.deployments:
            for replica in (*deployment.dead_replicas, *deployment.replicas):
                known = self._replicas.get(deployment.name)
                if known is None or replica.start_time_s >= known.start_time_s:
                    self._replicas[deployment.name] = replica

    def _logs(self, application: ApplicationView | None) -> list[str]:
        logs: list[str] = []
        for deployment in application.deployments if application else ():
            replica = self._replicas.get(deployment.name)
            if deployment.status != "HEALTHY" and replica is not None:
                lines = self.api.log_tail(replica, LOG_LINES)
                logs += (
                    [f"--- the last lines of {deployment.name}, replica {replica.replica_id}:", *lines] if lines else []
                )
        return logs


def _not_in_time(name: str, timeout_s: float, application: ApplicationView | None, proxy_problem: str | None) -> str:
    if application is None:
        return f"The cluster did not begin to deploy {name} within {timeout_s:g} s."
    waiting = [each for each in application.deployments if each.status != "HEALTHY"]
    said = [f"{each.name}: {each.status}, {each.reason or 'no reason given'}" for each in waiting]
    said += [proxy_problem] if proxy_problem else []
    return f"{name} does not run after {timeout_s:g} s, and Serve goes on trying. {' '.join(said)}".rstrip()


def public_url(api: ServeApi, service: ServiceConfig) -> str:
    """Where the service should be reached: on the cluster's head, unless the file says which address it listens on."""
    host = urlsplit(api.address).hostname if service.host in ("0.0.0.0", "::", "") else service.host
    return f"http://{host}:{service.port}{service.route_prefix.rstrip('/')}"


def _warn_of_other_http_options(actual: Mapping[str, Any], service: ServiceConfig) -> None:
    """Serve reads them when it starts, and ignores them from then on."""
    asked = {"host": service.host, "port": service.port}
    differing = {key: actual[key] for key, value in asked.items() if key in actual and actual[key] != value}
    if differing:
        there = ", ".join(f"{key} {value}" for key, value in differing.items())
        print(
            f"Serve runs already, with {there}: the file's http_options would count after `serve shutdown`.",
            file=sys.stderr,
        )


# What is shown meanwhile


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[ApplicationView], object]]:
    """In a terminal a table that is drawn again in its place, elsewhere a line for whatever changes."""
    console = Console()
    if not console.is_terminal:
        yield Lines(print)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda application: live.update(table_of(application), refresh=True)


def table_of(application: ApplicationView) -> Table:
    """One row per deployment."""
    table = Table("deployment", "status", "replicas", "", box=None, title_justify="left")
    for deployment in application.deployments:
        table.add_row(deployment.name, deployment.status, _replicas(deployment), deployment.reason)
    return table


class Lines:
    """A line for whatever has changed, where output is not a terminal."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._said: dict[str, str] = {}

    def __call__(self, application: ApplicationView) -> None:
        for deployment in application.deployments:
            text = f"{deployment.name}: {deployment.status} {_replicas(deployment)} {deployment.reason}".rstrip()
            if self._said.get(deployment.name) != text:
                self._said[deployment.name] = text
                self._write(text)


def _replicas(deployment: DeploymentView) -> str:
    return f"{deployment.num_running}/{deployment.target_num_replicas}"
