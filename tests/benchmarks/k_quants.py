"""Quire beside llama.cpp on a model of 1.07 billion random weights in K-quants, which most published files are in:
`python -m tests.benchmarks.k_quants --llama-server .../llama-server`.

llama.cpp's own tool quantizes it. Quire also reads the same numbers from a file of float32: it must answer likewise,
and what it gains by leaving weights packed is what lies between these two.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from quire.cluster.bench.machine import describe_machine
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info

from .peers.answers import Answers, num_equal, of_server
from .peers.checkpoint import requantized
from .peers.measure import Workload, load_server
from .peers.programs import QUANTIZE
from .peers.servers import MAX_MODEL_LEN, Server, engine_options, running, wait_until_at_rest

HIDDEN, LAYERS, MLP, HEADS, KV_HEADS, HEAD_DIM = 2048, 16, 8192, 32, 8, 64  # Llama 3.2 1B has these
LOADS = (Workload(1, 6, 0, 128, 64), Workload(8, 16, 0, 128, 64))
PRECISIONS = ("float32", "bfloat16", "int8")


def write_model(path: Path) -> None:
    """Random weights in float16, with the default model's tokenizer and its vocabulary."""
    source = GGUFReader(load_model_info(ModelConfig(model="smollm2-135m-instruct")).path)
    sizes = {
        "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": MLP, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM,
    }  # fmt: skip
    others: dict[str, object] = {f"llama.{name}": size for name, size in sizes.items()} | {"general.file_type": 1}
    writer = GGUFWriter(path, "llama")
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *_, item = (*field.types, field.types[-1])
            value = others.get(field.name, field.contents())
            writer.add_key_value(field.name, value, kind, sub_type=item if kind == GGUFValueType.ARRAY else None)
    vocab_size = next(int(tensor.shape[1]) for tensor in source.tensors if tensor.name == "token_embd.weight")
    rng = np.random.default_rng(0)
    for name, shape in _tensors(vocab_size):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            writer.add_tensor(f"{name}.weight", numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd", (vocab_size, HIDDEN)
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_norm": (HIDDEN,), "attn_q": (query, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, query), "ffn_norm": (HIDDEN,), "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }  # fmt: skip
    for layer in range(LAYERS):
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in shapes.items())
    yield "output_norm", (HIDDEN,)


def quire(model: Path, precision: str) -> Server:
    command = (sys.executable, "-m", "quire", "serve", "--port", "{port}", "--model", str(model))
    return Server("quire", (*command, *engine_options(precision)), "/ready")


def llamacpp(program: Path, model: Path) -> Server:
    """Keys and values in 16 bits, what multiplies weights in 8: its defaults. A slot for each stream."""
    threads, streams = len(os.sched_getaffinity(0)), LOADS[-1].concurrency
    command = (
        str(program), "--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--threads", str(threads),
        "--parallel", str(streams), "--ctx-size", str(streams * MAX_MODEL_LEN),
    )  # fmt: skip
    return Server("llama.cpp", command, "/health")


def measure(title: str, server: Server, folder: Path, *, asks: bool) -> tuple[str, Answers]:
    """A row of the table, and what it answers if it is asked."""
    cells = []
    with running(server, folder / "server.log") as (url, process):
        wait_until_at_rest(process)
        for seed, load in enumerate(LOADS):
            found = load_server(url, load, seed, lambda: None)
            cells += [f"{found.output_tokens_per_s:.1f}", f"{found.ttft_ms.p50:.0f}", f"{found.itl_ms.p50:.1f}"]
        answers = of_server(url, server.ask) if asks else []
    row = f"| {title} | {' | '.join(cells)} |"
    print(row, flush=True)
    return row, answers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.k_quants", description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True, help=f"its program; {QUANTIZE} lies beside it")
    parser.add_argument("--types", default="Q4_K_M", help="of files, as llama.cpp names them: Q4_K_M,Q6_K")
    parser.add_argument("--folder", type=Path, help="for the model's files, 9 GB; what is there is used again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-k-quants-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(" · ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)
        source = folder / "random.gguf"
        if not source.is_file():
            write_model(source.with_suffix(".part"))
            source.with_suffix(".part").rename(source)
        tool = args.llama_server.with_name(QUANTIZE)
        heads = [f"{load.concurrency} streams: {what}" for load in LOADS for what in ("tokens/s", "TTFT ms", "ITL ms")]
        print(f"\n| file, server | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
        for kind in args.types.split(","):
            packed = requantized(tool, source, folder / f"{kind}.gguf", kind)
            unpacked = requantized(tool, packed, folder / f"{kind}-float32.gguf", "F32")
            measure(f"{kind}, llama.cpp", llamacpp(args.llama_server, packed), folder, asks=False)
            found = {}
            for precision in PRECISIONS:
                title = f"{kind}, Quire in {precision}"
                found[precision] = measure(title, quire(packed, precision), folder, asks=precision == "float32")[1]
            title = f"{kind} as float32, Quire"
            _, expected = measure(title, quire(unpacked, "float32"), folder, asks=True)
            equal = num_equal(found["float32"], expected)
            print(f"{kind}: {equal} of {len(expected)} answers are those of its numbers in float32")
            unpacked.unlink()


if __name__ == "__main__":
    main()
