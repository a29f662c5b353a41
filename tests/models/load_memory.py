"""How long a load takes, and how much memory it needs beside the weights.

    python -m tests.models.load_memory PATH IMPLEMENTATION        prints one JSON object

A child process loads the checkpoint on one thread, and a thread of it looks at its anonymous memory (`RssAnon` in
`/proc/self/status`) every millisecond. Pages of mapped files are not in there: they are the kernel's, which drops them
when it needs them, while `ru_maxrss` counts them in.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARD_BYTES, NUM_SHARDS = 32 << 20, 8


@dataclass(frozen=True)
class Load:
    seconds: float
    weight_bytes: int
    largest_tensor: int  # bytes of the largest tensor in the checkpoint
    extra_bytes: int  # the most that was taken while loading, beyond the weights
    max_rss: int  # of the whole process, mapped files included

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"{self.weight_bytes / mib:.0f} MiB in {self.seconds:.2f} s, at most {self.extra_bytes / mib:.1f} MiB "
            f"beyond the weights (largest tensor {self.largest_tensor / mib:.1f} MiB)"
        )


def make_checkpoint(directory: Path) -> None:
    """A Llama of random float32 weights in shards, about `NUM_SHARDS` of `SHARD_BYTES`; the embedding fills one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 1024
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHARD_BYTES // 4 // hidden,
        hidden_size=hidden,
        intermediate_size=1365,
        num_hidden_layers=NUM_SHARDS - 1,
        num_attention_heads=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size=SHARD_BYTES)


def measure(path: Path, implementation: str) -> Load:
    """Load a checkpoint in a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.models.load_memory", str(path), implementation],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr)
    return Load(**json.loads(finished.stdout.splitlines()[-1]))


def _load(path: Path, implementation: str) -> Load:
    from safetensors import safe_open

    from quire.engine.config import EngineConfig
    from quire.engine.model_source import load_model_info
    from quire.workers.parallel import ParallelContext
    from quire.workers.worker import Worker

    fields = {"model": str(path), "implementation": implementation, "num_threads": 1, "device": "cpu"}
    config = EngineConfig.model_validate({"model": fields})
    info = load_model_info(config.model)
    if implementation == "transformers":
        import quire.workers.fallback  # noqa: F401  (its imports are not the load)
    worker = Worker(config, info, ParallelContext())
    before = _anonymous_bytes()
    started = time.perf_counter()
    with _watching() as peak:
        worker.load_model()
    seconds = time.perf_counter() - started
    largest = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            largest = max(largest, *(tensors.get_tensor(name).nbytes for name in tensors.keys()))  # noqa: SIM118
    weights = sum(parameter.nbytes for parameter in worker.model.parameters())
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Load(seconds, weights, largest, peak[0] - before - weights, max_rss)


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@contextmanager
def _watching() -> Iterator[list[int]]:
    """The largest number of anonymous bytes while inside, in a list of one."""
    peak, done = [_anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], _anonymous_bytes())


if __name__ == "__main__":
    print(json.dumps(asdict(_load(Path(sys.argv[1]), sys.argv[2]))))
