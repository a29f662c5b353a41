"""The commands for services that run elsewhere: `quire deploy`, `status`, `top` and `chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import header_value
from .faults import Fault

Address = Annotated[
    str,
    typer.Option(
        envvar="RAY_DASHBOARD_ADDRESS", help="The dashboard of a running Ray cluster, as `serve deploy` takes it."
    ),
]
Url = Annotated[str, typer.Option(help="The service, with or without /v1.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", callback=header_value, help="Sent as a bearer token.")
]


def deploy(
    config: Annotated[Path, typer.Argument(help="A Ray Serve config file, as those in configs/.")],
    *,
    address: Address = "http://127.0.0.1:8265",
    timeout_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds in which the service must run, before this is a failure.")
    ] = 1200.0,
    wait: Annotated[bool, typer.Option(help="Wait until the service runs, and show how far it is.")] = True,
) -> None:
    """Deploy a config file on a running Ray cluster.

    The file is checked first; then the command waits until the service runs. It replaces what the cluster's Serve has
    been given by files before. Where it runs already, engines and gateways are exchanged one by one. Status 1, the
    reason and the last log lines when it does not run. Ctrl-C ends only the wait.
    """
    from .cli_deploy import deploy as deploy_and_watch

    deploy_and_watch(config, address, timeout_s=timeout_s, wait=wait)


def status(
    *,
    url: Annotated[
        str | None,
        typer.Option(
            help="The service, with or without /v1. (default: http://127.0.0.1:8000, or none where --address is given)"
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="The dashboard of the Ray cluster that it runs on."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Show models, engines and replicas, and their health.

    By the service's own account (--url), by Serve's (--address), or both.
    Status 0 only when everything that was asked is healthy.
    """
    from .cli_status import status as print_status
    from .service_http import DEFAULT_URL, Service

    service = Service(url or DEFAULT_URL, api_key) if url is not None or address is None else None
    if not print_status(service, address, as_json=as_json):
        raise typer.Exit(1)


def top(
    *,
    url: Url = "http://127.0.0.1:8000",
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two frames.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Watch a service: queues, KV cache, tokens per second.

    Of each engine: requests that run and wait, why they wait, KV cache, prefix hits, tokens per second.
    """
    from .cli_top import top as draw_until_interrupted
    from .service_http import Service

    draw_until_interrupted(Service(url, api_key), interval_s=interval_s, once=once)


def chaos(
    fault: Annotated[Fault, typer.Argument(help="What happens: see above.")],
    *,
    url: Url = "http://127.0.0.1:8000",
    rank: Annotated[int, typer.Option(min=0, help="Which worker, where there are several.")] = 0,
    engine: Annotated[
        str | None, typer.Option(help="Id of an engine, as `quire status` shows it. (default: the first)")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Kill or stop a process of a service, on purpose.

    To see its streams go on. kill-worker, stop-worker: a rank's process gets SIGKILL or SIGSTOP. drop-step: a rank
    never gets its next step. kill-engine, stop-engine: the same signals to the process of the engine. The configuration
    must allow it (`allow_faults: true`). Where the service has API keys, it takes that of a tenant with `admin: true`.
    """
    from .service_http import Service

    done = Service(url, api_key).post("/chaos", {"fault": fault, "rank": rank, "engine": engine})
    print(f"{done['fault']}: engine {done['engine']}" + (f", rank {rank}" if "engine" not in fault else ""))
