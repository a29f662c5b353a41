"""Quire beside llama.cpp on a model of random weights in K-quants, which most published files are in:
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType

from quire.cluster.bench.machine import describe_machine
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info

from .peers.answers import Answers, num_equal, of_server
from .peers.checkpoint import requantized
from .peers.measure import Workload, load_server
from .peers.programs import QUANTIZE
from .peers.servers import MAX_MODEL_LEN, Server, engine_options, running, wait_until_at_rest


@dataclass(frozen=True)
class Shape:
    """Of a decoder whose head is its embedding, but for gpt-oss."""

    architecture: str
    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    chosen: int = 0  # of the experts, by each token

    @property
    def has_head_norms(self) -> bool:
        return self.architecture.startswith("qwen3")

    @property
    def has_sinks(self) -> bool:
        """And biases."""
        return self.architecture == "gpt-oss"


SHAPES = {
    "llama-1b": Shape("llama", 2048, 16, 8192, 32, 8, 64, 49_152),  # Llama 3.2 1B, with a smaller vocabulary
    "qwen3-0.6b": Shape("qwen3", 1024, 28, 3072, 16, 8, 128, 151_936),
    # Qwen3 30B-A3B, with a quarter of its layers and experts, of which half as many are chosen
    "qwen3-moe": Shape("qwen3moe", 2048, 12, 768, 32, 4, 128, 151_936, experts=32, chosen=4),
    # gpt-oss 20B, with a sixth of its layers and a smaller vocabulary
    "gpt-oss": Shape("gpt-oss", 2880, 4, 2880, 64, 8, 64, 49_152, experts=32, chosen=4),
}
LOADS = (Workload(1, 6, 0, 128, 64), Workload(8, 16, 0, 128, 64))
PRECISIONS = ("float32", "bfloat16", "int8")


def write_model(path: Path, shape: Shape) -> None:
    """Random weights in float16, with the default model's tokenizer, and tokens that no text has behind its own."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(1)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.mlp)
    if shape.has_sinks:
        writer.add_sliding_window(128)
    _add_tokenizer(writer, shape.vocab)
    rng = np.random.default_rng(0)
    for name, size in _tensors(shape):
        if name.endswith("norm"):
            writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
            continue
        numbers = rng.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        is_small = "gate_inp" in name or len(size) == 1 or name.endswith(".bias")
        named = name if name.endswith(".bias") else f"{name}.weight"
        writer.add_tensor(named, numbers if is_small else numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    source = GGUFReader(load_model_info(ModelConfig(model="smollm2-135m-instruct")).path)
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            kind, *_, item = (*field.types, field.types[-1])
            value = field.contents()
            if field.name == "tokenizer.ggml.tokens":
                value += [f"<unused {i}>" for i in range(len(value), vocab_size)]
            if field.name == "tokenizer.ggml.token_type":
                value += [TokenType.UNUSED] * (vocab_size - len(value))
            writer.add_key_value(field.name, value, kind, sub_type=item if kind == GGUFValueType.ARRAY else None)


def _tensors(of: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd", (of.vocab, of.hidden)
    if of.has_sinks:
        yield "output", (of.vocab, of.hidden)
    query, kv, up, down = of.heads * of.head_dim, of.kv_heads * of.head_dim, (of.mlp, of.hidden), (of.hidden, of.mlp)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (of.hidden,), "attn_q": (query, of.hidden), "attn_k": (kv, of.hidden), "attn_v": (kv, of.hidden),
        "attn_output": (of.hidden, query), "ffn_norm": (of.hidden,),
    }  # fmt: skip
    if of.has_sinks:
        del shapes["ffn_norm"]
        shapes |= {"post_attention_norm": (of.hidden,), "attn_sinks": (of.heads,), "attn_q.bias": (query,)}
        shapes |= {"attn_k.bias": (kv,), "attn_v.bias": (kv,), "attn_output.bias": (of.hidden,)}
        shapes |= {f"ffn_{name}_exps.bias": (of.experts, of.mlp) for name in ("gate", "up")}
        shapes |= {"ffn_down_exps.bias": (of.experts, of.hidden), "ffn_gate_inp.bias": (of.experts,)}
    if of.has_head_norms:
        shapes |= {"attn_q_norm": (of.head_dim,), "attn_k_norm": (of.head_dim,)}
    if of.experts:
        matrices = {"gate": up, "up": up, "down": down}
        shapes |= {f"ffn_{name}_exps": (of.experts, *size) for name, size in matrices.items()}
        shapes["ffn_gate_inp"] = (of.experts, of.hidden)
    else:
        shapes |= {"ffn_gate": up, "ffn_up": up, "ffn_down": down}
    for layer in range(of.layers):
        yield from ((f"blk.{layer}.{name}", size) for name, size in shapes.items())
    yield "output_norm", (of.hidden,)


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


def compare(shape: str, kinds: list[str], program: Path, folder: Path) -> None:
    """The rows of one model."""
    source, tool = folder / f"{shape}.gguf", program.with_name(QUANTIZE)
    if not source.is_file():
        write_model(source.with_suffix(".part"), SHAPES[shape])
        source.with_suffix(".part").rename(source)
    for kind in kinds:
        name = f"{shape} {kind}"
        packed = requantized(tool, source, folder / f"{shape}-{kind}.gguf", kind)
        measure(f"{name}, llama.cpp", llamacpp(program, packed), folder, asks=False)
        found = {}
        for precision in PRECISIONS:
            title = f"{name}, Quire in {precision}"
            found[precision] = measure(title, quire(packed, precision), folder, asks=precision == "float32")[1]
        unpacked = requantized(tool, packed, folder / f"{shape}-{kind}-float32.gguf", "F32")
        _, expected = measure(f"{name} as float32, Quire", quire(unpacked, "float32"), folder, asks=True)
        unpacked.unlink()
        equal = num_equal(found["float32"], expected)
        print(f"{name}: {equal} of {len(expected)} answers are those of its numbers in float32", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.k_quants", description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True, help=f"its program; {QUANTIZE} lies beside it")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="what models are like; all, if not named")
    parser.add_argument("--types", default="Q4_K_M", help="of files, as llama.cpp names them: Q4_K_M,Q6_K")
    parser.add_argument("--folder", type=Path, help="for the models' files, 25 GB; what is there is used again")
    args = parser.parse_args()
    shapes = args.shapes.split(",")
    if unknown := set(shapes) - set(SHAPES):
        parser.error(f"--shapes: {', '.join(sorted(unknown))} is not one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="quire-k-quants-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(" · ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)
        heads = [f"{load.concurrency} streams: {what}" for load in LOADS for what in ("tokens/s", "TTFT ms", "ITL ms")]
        print(f"\n| file, server | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
        for shape in shapes:
            compare(shape, args.types.split(","), args.llama_server, folder)


if __name__ == "__main__":
    main()
