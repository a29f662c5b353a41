"""`quire status`: whether a service is healthy, by what it says itself and by what Serve says of it."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.engine.errors import QuireError

from .cli_http import wide_console
from .serve_api import ApplicationView, ServeApi
from .service_http import Service

Report = dict[str, Any]


def status(service: Service | None, address: str | None, *, as_json: bool) -> bool:
    """Print it; True when everything that was asked is healthy."""
    report: Report = {}
    if service is not None:
        report["service"] = of_service(service)
    if address is not None:
        report["cluster"] = of_cluster(address)
    healthy = all(part["healthy"] for part in report.values())
    if as_json:
        print(json.dumps({"healthy": healthy, **report}, indent=2))
    else:
        _print(report, wide_console())
    return healthy


def of_service(service: Service) -> Report:
    """What the service says, or that it says nothing."""
    try:
        health = service.health()
    except QuireError as error:
        return {"url": service.root, "healthy": False, "status": "unreachable", "problem": error.message, "models": []}
    problem = health.get("error", {}).get("message")
    return {
        "url": service.root,
        "healthy": health["status"] in ("ok", "asleep"),
        "status": health["status"],
        "problem": problem,
        "models": health["models"],
    }


def of_cluster(address: str) -> Report:
    """What Serve says; healthy when there are applications, all of them run, and requests can come in."""
    try:
        with ServeApi(address) as api:
            cluster = api.look()
            applications = list(cluster.applications.values())
    except QuireError as error:
        return {"address": address, "healthy": False, "problem": error.message, "applications": []}
    problem = cluster.proxy_problem if applications else "Nothing is deployed."
    return {
        "address": address,
        "healthy": problem is None and all(each.status == "RUNNING" for each in applications),
        "problem": problem,
        "applications": [_application(each) for each in applications],
    }


def _application(application: ApplicationView) -> Report:
    deployments = [
        {
            "name": each.name,
            "status": each.status,
            "replicas": each.num_running,
            "target_replicas": each.target_num_replicas,
            "problem": each.reason or None,
        }
        for each in application.deployments
    ]
    return {"name": application.name, "status": application.status, "deployments": deployments}


def _print(report: Report, console: Console) -> None:
    if service := report.get("service"):
        console.print(f"service {service['url']}: {service['status']}", highlight=False)
        _print_problem(service, console)
        if service["models"]:
            console.print(_engines(service["models"]))
    if cluster := report.get("cluster"):
        console.print(f"cluster {cluster['address']}", highlight=False)
        _print_problem(cluster, console)
        if cluster["applications"]:
            console.print(_deployments(cluster["applications"]))


def _print_problem(part: Report, console: Console) -> None:
    if part["problem"]:
        console.print(f"  {part['problem']}", highlight=False, markup=False, soft_wrap=True)


def _engines(models: list[Report]) -> Table:
    table = Table("model", "engine", "status", "running", "waiting", "problem", box=None)
    for model in models:
        for engine in model["engines"]:
            numbers = (str(engine["num_running"]), str(engine["num_waiting"]))
            table.add_row(model["id"], engine["id"], engine["status"], *numbers, engine["problem"] or "")
        if not model["engines"] or (model["problem"] and all(e["problem"] is None for e in model["engines"])):
            table.add_row(model["id"], "", model["status"], "", "", model["problem"] or "")
    return table


def _deployments(applications: list[Report]) -> Table:
    table = Table("application", "status", "deployment", "status", "replicas", "problem", box=None)
    for application in applications:
        for each in application["deployments"]:
            replicas = f"{each['replicas']}/{each['target_replicas']}"
            problem = each["problem"] or ""
            table.add_row(application["name"], application["status"], each["name"], each["status"], replicas, problem)
    return table
