"""The peers that have a server: what each is called, the option that names its program, and how that is started.

Those whose engine is vLLM have 2 GB of KV cache, others room for the context of each stream.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .answers import ask_dynamo, ask_llamacpp, ask_sglang
from .checkpoint import export, gguf_file
from .servers import LD_PRELOAD, MAX_MODEL_LEN, Server

MODEL = "smollm2"  # its name in requests, where that is not the folder's
QUANTIZE = "llama-quantize"  # llama.cpp's tool, beside its server
PRELOAD_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # vLLM asks for them, for its best speed on a CPU


@dataclass(frozen=True, slots=True)
class Setup:
    """What a peer is started with."""

    program: Path
    folder: Path  # for the weights that it reads; those that are there are used again
    precision: str
    num_streams: int  # at most, at a time
    given: Path | None = None  # another checkpoint than the default model's

    @property
    def checkpoint(self) -> Path:
        return self.given or export(self.folder / self.precision, self.precision)

    @property
    def dtype(self) -> str:
        """Of what has no 8 bits."""
        return "bfloat16" if self.precision == "int8" else self.precision

    @property
    def num_threads(self) -> int:
        """One on each core."""
        return len(os.sched_getaffinity(0))

    @property
    def cores(self) -> str:
        """What they are bound to, where that can be said."""
        return ",".join(map(str, sorted(os.sched_getaffinity(0))))

    @property
    def environment(self) -> Mapping[str, str]:
        """Of a peer in Python: it fetches nothing, and finds the compiler that lies beside it."""
        return {
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{self.program.parent}{os.pathsep}{os.environ['PATH']}",
        }


def _vllm(setup: Setup) -> Server:
    """Its OpenAI server."""
    command = (
        str(setup.program), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.checkpoint),
        "--served-model-name", MODEL, "--dtype", setup.dtype, "--host", "127.0.0.1", "--port", "{port}",
        "--max-model-len", str(MAX_MODEL_LEN), "--enable-prefix-caching", "--enable-prompt-tokens-details",
    )  # fmt: skip
    return Server("vllm", command, "/health", environment=_vllm_environment(setup))


def _ray(setup: Setup) -> Server:
    """It has vLLM for its engine, with that engine's options as above, but without the libraries: they made it slower
    on the one machine where it was tried (HISTORY.md)."""
    environment = {**_engine_environment(setup), "RAY_USAGE_STATS_ENABLED": "0"}
    return Server("ray", _by_script("ray_llm.py", setup), "/v1/models", environment=environment)


def _dynamo(setup: Setup) -> Server:
    """It has vLLM for its engine, too, with that engine's options and libraries. Its frontend answers before it knows
    an engine."""
    command, environment = _by_script("dynamo_vllm.py", setup), _vllm_environment(setup)
    return Server("dynamo", command, "/v1/models", f'"{MODEL}"', environment, ask_dynamo)


def _by_script(name: str, setup: Setup) -> tuple[str, ...]:
    script = Path(__file__).with_name(name)
    return (str(setup.program), str(script), MODEL, str(setup.checkpoint), setup.dtype, str(MAX_MODEL_LEN), "{port}")


def _vllm_environment(setup: Setup) -> dict[str, str]:
    """With those of `PRELOAD_LIBRARIES` that lie in `lib` of the peer's environment."""
    libraries = (setup.program.parent.parent / "lib" / name for name in PRELOAD_LIBRARIES)
    return {
        **_engine_environment(setup),
        LD_PRELOAD: ":".join(str(library) for library in libraries if library.exists()),
    }


def _engine_environment(setup: Setup) -> dict[str, str]:
    return {
        **setup.environment,
        "VLLM_CPU_OMP_THREADS_BIND": setup.cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _sglang(setup: Setup) -> Server:
    """Its kernels for CPUs ask for AMX: elsewhere torch's operators compute, one by one. It is without vLLM's
    libraries, for the reason that Ray Serve LLM is."""
    command = (
        str(setup.program), "-m", "sglang.launch_server", "--model-path", str(setup.checkpoint),
        "--served-model-name", MODEL, "--dtype", setup.dtype, "--device", "cpu", "--host", "127.0.0.1",
        "--port", "{port}", "--context-length", str(MAX_MODEL_LEN), "--enable-cache-report",
        "--max-total-tokens", str(setup.num_streams * MAX_MODEL_LEN),
    )  # fmt: skip
    environment = {
        **setup.environment,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": setup.cores,
        "OMP_NUM_THREADS": str(setup.num_threads),
    }
    return Server("sglang", command, "/health", environment=environment, ask=ask_sglang)


def _llamacpp(setup: Setup) -> Server:
    """A slot for each stream; keys and values in float32 where the weights are, else in 16 bits, which is its
    default."""
    weights = gguf_file(setup.folder, setup.precision, setup.program.with_name(QUANTIZE))
    cache = ("--cache-type-k", "f32", "--cache-type-v", "f32") if setup.precision == "float32" else ()
    command = (
        str(setup.program), "--model", str(weights), "--host", "127.0.0.1", "--port", "{port}",
        "--threads", str(setup.num_threads), "--parallel", str(setup.num_streams),
        "--ctx-size", str(setup.num_streams * MAX_MODEL_LEN), *cache,
    )  # fmt: skip
    return Server("llamacpp", command, "/health", ask=ask_llamacpp)


@dataclass(frozen=True, slots=True)
class Peer:
    title: str
    option: str
    help: str
    server: Callable[[Setup], Server]
    beside: tuple[str, ...] = ()  # programs that lie beside it and are needed, too
    has_int8: bool = True
    is_packed_in_int8: bool = False  # reads the packed file there; others have a part of it in 16 bits


PEERS = {
    "vllm": Peer("vLLM", "--vllm-python", "a Python with vllm (for CPUs) installed", _vllm),
    "llamacpp": Peer(
        "llama.cpp", "--llama-server", "llama.cpp's server", _llamacpp, (QUANTIZE,), is_packed_in_int8=True
    ),
    "ray": Peer("Ray Serve LLM", "--ray-python", "a Python with Ray Serve LLM and vllm (for CPUs) installed", _ray),
    "dynamo": Peer("Dynamo", "--dynamo-python", "a Python with ai-dynamo and vllm (for CPUs) installed", _dynamo),
    "sglang": Peer("SGLang", "--sglang-python", "a Python with sglang installed; not in int8", _sglang, has_int8=False),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, peer in PEERS.items():
        parser.add_argument(peer.option, dest=name, type=Path, metavar="PATH", help=peer.help)


def given(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Path]:
    """By peer, of those whose option was given. Ends the program where one is not there: its turn comes late."""
    paths = {name: getattr(args, name) for name in PEERS}
    for name, path in paths.items():
        needed = [] if path is None else [path, *(path.with_name(other) for other in PEERS[name].beside)]
        for each in needed:
            if not os.access(each, os.X_OK):
                parser.error(f"{PEERS[name].option}: {each} is not a program")
    return {name: path.absolute() for name, path in paths.items() if path is not None}
