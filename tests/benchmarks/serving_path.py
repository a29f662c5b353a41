"""What the way from the engine to the client costs: CPU time of every process of the service.

`python -m tests.benchmarks.serving_path` starts `quire serve`, watches it while it has nothing to do, then puts streams
on it. For each process it prints the share of a core that it takes when idle, and the CPU time on top of that per 1,000
output tokens; for the engine also by thread, where py-spy is installed. CPU time, unlike wall time, says much on a busy
machine too. What all of it together does to the rate, `tests.benchmarks.peers` tells.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from quire.cluster.bench.latency import Summary
from quire.cluster.bench.machine import describe_machine

from .peers.measure import Workload, load_server
from .peers.servers import quire_server, running, wait_until_at_rest

IDLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Shares of one core when idle, and CPU milliseconds per 1,000 output tokens on top, by role."""

    num_tokens: int
    idle: dict[str, float]
    by_role: dict[str, float]
    engine_threads: dict[str, float]  # CPU milliseconds per 1,000 tokens with what they take when idle
    summary: Summary


def role_of(process: psutil.Process) -> str:
    """What a process of the service is, by how Ray and Serve name them."""
    title = " ".join(process.cmdline())
    for mark, role in (
        ("ServeReplica:quire:Gateway", "gateway"),
        ("ServeReplica:quire:Engine", "engine"),
        ("haproxy", "HTTP tier"),
        ("ProxyActor", "HTTP tier"),
        ("HAProxyManager", "HTTP tier"),
        ("ServeController", "Serve's controller"),
        ("gcs_server", "Ray's GCS"),
    ):
        if mark in title:
            return role
    return "the rest of Ray"


def cpu_seconds(service: psutil.Process) -> tuple[Counter[str], dict[int, float]]:
    """CPU seconds so far by role, and of the engine's threads by their id."""
    roles: Counter[str] = Counter()
    threads: dict[int, float] = {}
    for process in [service, *service.children(recursive=True)]:
        try:
            role, times = role_of(process), process.cpu_times()
            roles[role] += times.user + times.system
            if role == "engine":
                threads |= {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        except psutil.NoSuchProcess:
            continue
    return roles, threads


def thread_names(service: psutil.Process) -> dict[int, str]:
    """Names of the Python threads of the engine, by id; nothing without py-spy, or where it may not look."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    engines = [process for process in service.children(recursive=True) if role_of(process) == "engine"]
    if tool is None or not engines:
        return {}
    command = [tool, "dump", "--json", "--pid", str(engines[0].pid)]
    dumped = subprocess.run(command, capture_output=True, text=True, check=False)
    if dumped.returncode != 0:
        return {}
    return {thread["os_thread_id"]: thread["thread_name"] for thread in json.loads(dumped.stdout)}


def measure(precision: str, workload: Workload, folder: Path) -> Cost:
    """Start the service, warm it up, and count what a load costs."""
    with running(quire_server(precision), folder / "quire.log") as (url, service):
        load_server(url, workload, seed=1, on_request=lambda: None)
        names = thread_names(service)
        wait_until_at_rest(service)
        idle_from, _ = cpu_seconds(service)
        time.sleep(IDLE_S)
        before, threads = cpu_seconds(service)
        summary = load_server(url, workload, seed=2, on_request=lambda: None)
        after, threads_after = cpu_seconds(service)
    num_tokens = summary.num_output_tokens + workload.output_len  # the client begins with one request of its own
    duration_s = summary.duration_s * num_tokens / summary.num_output_tokens
    scale = 1e6 / num_tokens  # seconds -> ms per 1,000 tokens
    idle = {role: (before[role] - idle_from[role]) / IDLE_S for role in before}
    by_role = {role: (after[role] - before[role] - idle.get(role, 0.0) * duration_s) * scale for role in after}
    by_role["client"] = summary.client_cpu_share * summary.duration_s * 1e6 / summary.num_output_tokens
    by_thread: Counter[str] = Counter()
    for thread, seconds in threads_after.items():
        # Native threads compute with the one that steps.
        by_thread[names.get(thread, "native threads")] += (seconds - threads.get(thread, 0.0)) * scale
    return Cost(num_tokens, idle, by_role, {name: ms for name, ms in by_thread.items() if ms}, summary)


def markdown(cost: Cost) -> str:
    """Two tables."""
    lines = ["| process | idle, of one core | CPU ms per 1,000 tokens on top |", "|---|---|---|"]
    for role, ms in sorted(cost.by_role.items(), key=lambda item: -item[1]):
        lines.append(f"| {role} | {cost.idle.get(role, 0.0):.1%} | {ms:,.0f} |")
    lines += ["", "| thread of the engine | CPU ms per 1,000 tokens |", "|---|---|"]
    lines += [f"| {name} | {ms:,.0f} |" for name, ms in sorted(cost.engine_threads.items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.serving_path", description=__doc__)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    workload = Workload(args.concurrency, args.num_requests, 0, 128, args.output_len)
    with tempfile.TemporaryDirectory(prefix="quire-path-") as folder:
        cost = measure(args.precision, workload, Path(folder))
    machine = describe_machine()
    facts = " · ".join(f"{name} {value}" for name, value in machine.items())
    print(f"{facts}; {workload.concurrency} streams, {workload.title}, {cost.num_tokens} tokens\n\n{markdown(cost)}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, **asdict(cost)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
