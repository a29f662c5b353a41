"""The REST API of Ray Serve on a running cluster, as far as the command line needs it. Starts and imports no Ray,
except where the cluster asks for Ray's own token.

What comes back is Serve's `ServeInstanceDetails` as plain data; `ApplicationView` and its parts are what is shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from quire.engine.errors import QuireError

_APPLICATIONS = "/api/serve/applications/"
_DEPLOY_TIMEOUT_S = 120.0  # the first deployment on a cluster starts Serve itself
_READ_TIMEOUT_S = 30.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ClusterError(QuireError):
    """The cluster cannot be reached, or refuses."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica, alive or not. `actor_id` is None until its process is there."""

    replica_id: str
    state: str
    actor_id: str | None
    start_time_s: float


@dataclass(frozen=True, slots=True)
class DeploymentView:
    name: str
    status: str
    message: str
    target_num_replicas: int
    replicas: tuple[ReplicaView, ...]
    dead_replicas: tuple[ReplicaView, ...]

    @property
    def num_running(self) -> int:
        return sum(replica.state == "RUNNING" for replica in self.replicas)

    @property
    def reason(self) -> str:
        """The line of Serve's message that says what went wrong: the error, where there is a traceback."""
        return last_error(self.message)


@dataclass(frozen=True, slots=True)
class ApplicationView:
    name: str
    status: str
    message: str
    last_deployed_time_s: float
    deployments: tuple[DeploymentView, ...]

    @property
    def reason(self) -> str:
        """Why it does not run: what its deployments say, else what Serve says of the application."""
        failed = [each for each in self.deployments if each.status in ("DEPLOY_FAILED", "UNHEALTHY")]
        said = [f"{each.name}: {each.reason}" for each in failed if each.reason]
        return " ".join(said) or last_error(self.message)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What one look at Serve shows. `proxies` are the statuses of its HTTP proxies, by node address."""

    applications: dict[str, ApplicationView]
    proxies: dict[str, str]
    http_options: dict[str, Any]
    has_proxies: bool = True  # False where the deployer wants none

    @property
    def proxy_problem(self) -> str | None:
        """Why requests cannot come in; None when they can, at one node at least."""
        if not self.has_proxies or "HEALTHY" in self.proxies.values():
            return None
        states = ", ".join(f"{status} on {node}" for node, status in self.proxies.items())
        return f"No HTTP proxy is healthy ({states or 'none is there yet'})."


class ServeApi:
    """Serve on the cluster whose dashboard is at `address`. Raises `ClusterError`, in one line."""

    def __init__(self, address: str) -> None:
        self.address = (address if "://" in address else f"http://{address}").rstrip("/")
        self._http = httpx.Client(base_url=self.address, headers=_token_headers(), timeout=_READ_TIMEOUT_S)

    def __enter__(self) -> ServeApi:
        return self

    def __exit__(self, *exc_info: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._http.close()

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Make the cluster serve what a config file says: these applications, and no other."""
        self._ask("PUT", _APPLICATIONS, json=config, timeout=_DEPLOY_TIMEOUT_S)

    def look(self) -> ClusterView:
        """What is deployed, and how it is."""
        details: dict[str, Any] = self._ask("GET", _APPLICATIONS).json()
        return ClusterView(
            {name: _application(data) for name, data in details.get("applications", {}).items()},
            {each.get("node_ip") or node: each["status"] for node, each in details.get("proxies", {}).items()},
            details.get("http_options") or {},
            details.get("proxy_location") != "Disabled",
        )

    def log_tail(self, replica: ReplicaView, num_lines: int) -> list[str]:
        """The last lines that a replica has written to its stderr; none where they cannot be had any more."""
        if replica.actor_id is None:
            return []
        query = {"actor_id": replica.actor_id, "suffix": "err", "lines": str(num_lines), "filter_ansi_code": "true"}
        try:
            return self._ask("GET", "/api/v0/logs/file", params=query).text.splitlines()[-num_lines:]
        except ClusterError:
            return []

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ClusterError(f"address: no Ray dashboard answers at {self.address} ({reason}).") from error
        if response.status_code == httpx.codes.NOT_FOUND:
            raise ClusterError(f"address: {self.address} is not the dashboard of a Ray cluster with Serve.")
        if response.is_error:
            raise ClusterError(f"The cluster refused ({response.status_code}): {last_error(response.text)}")
        return response


def last_error(text: str) -> str:
    """The line of a traceback that says what happened, or the first line of a text without one."""
    lines = [line.strip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "Exception: " in line]
    if not errors:
        return lines[0] if lines else ""
    return errors[-1].split("Error: ", 1)[-1]


def _application(data: Mapping[str, Any]) -> ApplicationView:
    deployments = tuple(_deployment(each) for each in data.get("deployments", {}).values())
    deployed_s = float(data.get("last_deployed_time_s", 0.0))
    return ApplicationView(data["name"], data["status"], data.get("message", ""), deployed_s, deployments)


def _deployment(data: Mapping[str, Any]) -> DeploymentView:
    return DeploymentView(
        data["name"],
        data["status"],
        data.get("message", ""),
        data.get("target_num_replicas", 0),
        tuple(_replica(each) for each in data.get("replicas", [])),
        tuple(_replica(each) for each in data.get("recent_dead_replicas", [])),
    )


def _replica(data: Mapping[str, Any]) -> ReplicaView:
    return ReplicaView(data["replica_id"], data["state"], data.get("actor_id"), data.get("start_time_s", 0.0))


def _token_headers() -> dict[str, str]:
    """Ray's bearer token, where this user's environment says that clusters ask for one."""
    if os.environ.get("RAY_AUTH_MODE", "disabled").lower() == "disabled":
        return {}
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

    return dict(get_auth_headers_if_auth_enabled({}))
