"""What is measured of each contestant: the same load through the same client, or the same work in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.cluster.bench.latency import Summary
from quire.cluster.bench.serve import Load, measure
from quire.cluster.bench.workload import Lengths
from quire.engine.errors import QuireError

from .servers import engine_options

MIN_REQUESTS, MAX_REQUESTS = 8, 32  # of a level: one with many streams takes long enough with one request each
VOCAB_SIZE = 10_000
WAVES = 3  # over HTTP and offline
TEMPERATURE, TOP_P = 0.8, 0.95  # where tokens are sampled


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop of `concurrency` streams. Lengths are in tokens."""

    concurrency: int
    num_requests: int
    prefix_len: int
    input_len: int
    output_len: int
    is_sampled: bool = False  # at a temperature and with top-p, as most clients ask; else greedy

    @property
    def is_plain(self) -> bool:
        """Greedy, nothing shared: what others are compared with."""
        return not (self.prefix_len or self.is_sampled)

    @property
    def title(self) -> str:
        prompt = f"{self.prefix_len} shared + {self.input_len}" if self.prefix_len else f"{self.input_len}"
        sampled = f", temperature {TEMPERATURE:g}, top-p {TOP_P:g}" if self.is_sampled else ""
        return f"{prompt} in, {self.output_len} out{sampled}"


@dataclass(frozen=True, slots=True)
class Served:
    """One level of load on one server."""

    round: int
    server: str
    precision: str
    workload: Workload
    output_tokens_per_s: float
    ttft_ms: float  # medians
    itl_ms: float
    tpot_ms: float  # unlike `itl_ms`, of every token, whether its text comes at once or with that of the next
    cached_share: float  # of the prompt tokens
    client_cpu_share: float
    memory_gb_per_s: float | None = None  # of a sum right before and after one stream

    @classmethod
    def of(cls, summary: Summary, round_: int, server: str, precision: str, workload: Workload) -> Served:
        return cls(
            round_,
            server,
            precision,
            workload,
            summary.output_tokens_per_s,
            summary.ttft_ms.p50,
            summary.itl_ms.p50,
            summary.tpot_ms.p50,
            summary.num_cached_tokens / summary.num_prompt_tokens,
            summary.client_cpu_share,
        )


def workloads(concurrency: Sequence[int], output_len: int) -> list[Workload]:
    """Prompts of 128 tokens at every level; at the second one (8 streams) 512 shared ones + 32, and answers that are
    sampled. The shared tokens come in three waves: the first finds nothing cached, and must not be half of the median.
    """
    plain = [Workload(c, _num_requests(c), 0, 128, output_len) for c in concurrency]
    second = sorted(concurrency)[min(1, len(concurrency) - 1)]
    shared = Workload(second, 3 * second, 512, 32, output_len)
    return [*plain, shared, Workload(second, _num_requests(second), 0, 128, output_len, is_sampled=True)]


def _num_requests(num_streams: int) -> int:
    return min(MAX_REQUESTS, max(MIN_REQUESTS, 2 * num_streams))


def waves(num_streams: int, output_len: int) -> Workload:
    """Over HTTP, what `offline_tokens_per_s` does in a process: of one wave alone, others that want the cores for a
    moment would be a tenth."""
    return Workload(num_streams, WAVES * num_streams, 0, 128, output_len)


def load_server(url: str, workload: Workload, seed: int, on_request: Callable[[], None]) -> Summary:
    """Raises `QuireError` where a request failed: rates of what is left would say nothing."""
    lengths = (Lengths(workload.input_len, workload.input_len), Lengths(workload.output_len, workload.output_len))
    load = Load(
        url=url,
        model=None,
        endpoint="completions",
        concurrency=(workload.concurrency,),
        rates=(),
        num_requests=workload.num_requests,
        prefix_len=workload.prefix_len,
        input_len=lengths[0],
        output_len=lengths[1],
        temperature=TEMPERATURE if workload.is_sampled else 0.0,
        top_p=TOP_P if workload.is_sampled else 1.0,
        vocab_size=VOCAB_SIZE,
        seed=seed,
        api_key=None,
        timeout_s=600.0,
    )
    result = measure(load, lambda _: None, on_request)
    (summary,) = result.levels
    if result.errors or not result.exact_output_len:
        raise QuireError(f"{url}: {workload.title}: {result.errors or 'answers have lengths of their own'}")
    return summary


def offline_tokens_per_s(precision: str, num_streams: int, output_len: int, folder: Path) -> float:
    """`quire bench offline` in a process of its own: as many prompts at a time."""
    result = folder / "offline.json"
    command = (
        sys.executable, "-m", "quire", "bench", "offline", "--num-prompts", str(WAVES * num_streams),
        "--max-num-seqs", str(num_streams), "--input-len", "128",
        "--output-len", str(output_len), "--json", str(result), *engine_options(precision),
    )  # fmt: skip
    _run(command)
    rate: float = json.loads(result.read_text())["result"]["output_tokens_per_s"]
    return rate


def hf_results(
    checkpoint: Path, precision: str, batches: Sequence[int], output_len: int, threads: int
) -> tuple[list[list[int]], dict[int, float]]:
    """The answers of `transformers`' `generate`, and its output tokens per second by batch."""
    command = (
        sys.executable, "-m", "tests.benchmarks.peers.hf", str(checkpoint), "--dtype", precision,
        "--output-len", str(output_len), "--threads", str(threads), "--batch", *map(str, batches),
    )  # fmt: skip
    document = json.loads(_run(command).splitlines()[-1])
    return document["answers"], {int(batch): rate for batch, rate in document["output_tokens_per_s"].items()}


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise QuireError(f"{' '.join(command[:5])} failed:\n{done.stderr[-2000:]}")
    return done.stdout
