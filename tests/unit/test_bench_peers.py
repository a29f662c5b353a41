"""The comparison with peers: what its tables say of given measurements, and how each is started."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest
import torch
from safetensors.torch import load_file

from quire.cluster.bench.latency import RequestTiming, summarize
from quire.engine.config import ModelConfig
from quire.engine.errors import QuireError
from quire.engine.model_source import load_model_info
from quire.workers.loader.checkpoint import open_checkpoint
from tests.benchmarks.peers import __main__ as peers
from tests.benchmarks.peers import answers, compare, limits
from tests.benchmarks.peers.checkpoint import export, gguf_file
from tests.benchmarks.peers.compare import Comparison
from tests.benchmarks.peers.limits import Limits, readable, reading_gb_per_s
from tests.benchmarks.peers.measure import Served, Workload, workloads
from tests.benchmarks.peers.programs import PEERS, PRELOAD_LIBRARIES, Setup
from tests.benchmarks.peers.report import faults, markdown
from tests.benchmarks.peers.servers import PeerError, Server

ONE = Workload(1, 3, 0, 128, 128)
EIGHT = Workload(8, 16, 0, 128, 128)


def served(round_: int, server: str, workload: Workload, rate: float, itl_ms: float) -> Served:
    tpot_ms = itl_ms * 0.8  # some tokens come without text, which the next one brings
    memory = (16.0, 24.0)[round_] if workload.concurrency == 1 else None
    return Served(round_, server, "float32", workload, rate, 100.0, itl_ms, tpot_ms, 0.5, 0.01, memory)


def comparison() -> Comparison:
    return Comparison(
        limits=[Limits(2, 20.0, 16.0, 0.2, 0.4), Limits(2, 22.0, 24.0, 0.2, 0.4)],
        weight_bytes={"float32": 500_000_000},
        packed_bytes={"float32": 100_000_000},
        served=[
            served(0, "unpacked", ONE, 21.0, 25.0),
            served(0, "quire", ONE, 28.0, 25.0),
            served(0, "vllm", ONE, 10.0, 100.0),
            served(1, "vllm", ONE, 18.0, 100.0),
            served(1, "quire", ONE, 32.0, 50.0),
            served(0, "quire", EIGHT, 150.0, 50.0),
        ],
        waves=[("float32", 90.0, 100.0), ("float32", 40.0, 50.0)],
        hf=[("float32", 8, 50.0), ("float32", 8, 100.0)],
        answers={
            "quire float32": [[[1, 2], [3]], [[1, 2], [3]]],
            "hf float32": [[[1, 2], [3]], [[1, 2], [3]]],
            "vllm float32": [[[1, 2], [4]], [[1, 2], [4]]],
        },
    )


def test_tables_show_medians_and_ratios() -> None:
    text = markdown(comparison())
    assert "| sum of 1 GiB, read | 20.0 GB/s |" in text
    assert "| float32 | 128 in, 128 out | 1 | 30.0 | 100 | 37.5 | 50% | 21.0 | 100 | 25.0 | 50% |" in text
    assert "| float32 | 128 in, 128 out | 8 | 150.0 | 100 | 50.0 | 50% |  |  |  |  |" in text
    assert "| float32 | 128 in, 128 out | 1 | 14.0 | 100 | 100.0 | 50% | **2.14×** (aim 1.5×) | **1.50×** |" in text
    assert "| float32 | quire | 37.5 | 20.0 | 200.0 | **21%** |" in text
    assert "| float32 | unpacked | 50.0 | 16.0 | 32.0 | **156%** |" in text
    assert "| float32 | 8 | 75.0 | 150.0 | **2.00×** (aim 2×) |" in text
    assert "| float32 | 65.0 | 75.0 | **85%** (aim 90%) |" in text
    assert "- vllm float32: 1 of 2 greedy answers" in text


def test_each_peer_that_was_measured_has_a_table() -> None:
    found = comparison()
    found.served += [served(0, "llamacpp", ONE, 20.0, 40.0), served(0, "llamacpp", EIGHT, 50.0, 100.0)]
    text = markdown(found)
    assert "vLLM, and Quire's tok/s as multiples of its:" in text
    assert "Ray Serve LLM" not in text
    table = text[text.index("llama.cpp, and Quire's tok/s as multiples of its:") :]
    assert "| float32 | 128 in, 128 out | 8 | 50.0 | 100 | 100.0 | 50% | **3.00×** |  |" in table
    assert "| float32 | llamacpp | 31.2 | 16.0 | 32.0 | **98%** |" in text
    packed = [replace(served(0, name, ONE, 20.0, 40.0), precision="int8") for name in ("quire", "llamacpp", "vllm")]
    text = markdown(Comparison(limits=found.limits, weight_bytes={}, packed_bytes={"int8": 10**8}, served=packed))
    assert "| int8 | llamacpp | 31.2 | 16.0 | 160.0 | **20%** |" in text
    assert "| int8 | vllm | 31.2 |" not in text


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_who_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def plan_of(*options: object) -> compare.Plan:
        plans: list[compare.Plan] = []
        monkeypatch.setattr(peers, "compare", lambda plan, found, say: plans.append(plan))
        monkeypatch.setattr(peers, "markdown", lambda found: "")
        monkeypatch.setattr(sys, "argv", ["peers", "--folder", str(tmp_path), *map(str, options)])
        assert peers.main() == 0
        return plans[0]

    def refusal(*options: object) -> str:
        with pytest.raises(SystemExit, match="2"):
            plan_of(*options)
        return capsys.readouterr().err

    python, llama = program(tmp_path / "python"), program(tmp_path / "llama-server")
    assert f"--llama-server: {tmp_path / 'llama-quantize'} is not a program" in refusal("--llama-server", llama)
    program(tmp_path / "llama-quantize")
    assert plan_of().contestants == ("quire", "unpacked", "hf")
    chosen = plan_of("--llama-server", llama, "--vllm-python", python)
    assert chosen.contestants == ("quire", "unpacked", "vllm", "llamacpp", "hf")
    assert chosen.programs == {"vllm": python, "llamacpp": llama}
    assert plan_of("--llama-server", llama, "--only", "quire").contestants == ("quire",)
    assert "--ray-python: needed for ray, which --only names" in refusal("--only", "quire,ray")
    assert "--vllm-python: /no/python is not a program" in refusal("--vllm-python", "/no/python")
    assert plan_of("--precision", "int8").contestants == ("quire", "unpacked", "hf")  # the last two have no turn
    assert "--only: hf: not measured in int8" in refusal("--only", "quire,hf", "--precision", "int8")


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_how_a_peer_is_started(precision: str, tmp_path: Path) -> None:
    """llama.cpp is given the default model's own file where it multiplies bytes, else one that its tool writes; all
    others a checkpoint. A port is filled in."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    quantize = bin_folder / "llama-quantize"
    quantize.write_text('#!/bin/sh\nprintf "%s %s" "$4" "$(basename "$2")" > "$3"\n')
    quantize.chmod(0o755)
    pythons = {name: Path(f"/{name}/python") for name in PEERS if name != "llamacpp"}
    programs = {**pythons, "llamacpp": bin_folder / "llama-server"}
    plan = compare.Plan((), (), (1, 4), (), 8, 1, programs, tmp_path, 2)
    packed = load_model_info(ModelConfig()).path
    llama = compare.server_of(plan, "llamacpp", precision)
    given = Path(llama.command[llama.command.index("--model") + 1])
    if precision == "int8":
        assert given == packed
        assert "--cache-type-k" not in llama.command
    else:
        assert given.read_text() == f"F32 {packed.name}"
        assert llama.command[-4:] == ("--cache-type-k", "f32", "--cache-type-v", "f32")
    assert llama.command[llama.command.index("--parallel") + 1] == "4"
    for name in pythons:
        if precision == "int8" and not PEERS[name].has_int8:
            continue
        server = compare.server_of(plan, name, precision)
        assert str(programs[name]) == server.command[0]
        assert str(tmp_path / precision) in server.command
        assert ("bfloat16" if precision == "int8" else precision) in server.command
        assert "{port}" in server.command


def test_libraries_that_a_peer_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in its environment are preloaded, and the table says which they were."""
    folder = tmp_path / "environment"
    (folder / "lib").mkdir(parents=True)
    python = folder / "bin" / "python"
    (tmp_path / "float32").mkdir()
    (tmp_path / "float32" / "config.json").touch()  # else a checkpoint would be written

    def server(name: str) -> Server:
        precision = "int8" if name == "llamacpp" else "float32"  # where llama.cpp needs no file written
        return PEERS[name].server(Setup(python, tmp_path, precision, 1))

    none = {"llamacpp": None, "ray": None, "sglang": None}
    assert {name: server(name).preloaded for name in PEERS} == {**none, "vllm": [], "dynamo": []}
    for library in PRELOAD_LIBRARIES:
        (folder / "lib" / library).touch()
    both = ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    assert {name: server(name).preloaded for name in PEERS} == {**none, "vllm": both, "dynamo": both}
    assert server("vllm").environment["LD_PRELOAD"] == ":".join(f"{folder}/lib/{library}" for library in both)

    def not_running(server: Server, log: Path) -> NoReturn:
        raise PeerError(f"{server.name} did not start (log: {log})")

    monkeypatch.setattr(compare, "running", not_running)
    plan = compare.Plan(("vllm", "ray"), ("float32",), (1,), (8,), 8, 1, {"vllm": python, "ray": python}, tmp_path, 2)
    found = comparison()
    for name in plan.contestants:
        with pytest.raises(PeerError):
            compare._measure_one(plan, found, name, "float32", 0, lambda text: None)
    assert found.preloaded == {"vllm": both}
    assert "vLLM with libtcmalloc_minimal.so.4 and libiomp5.so, and Quire's tok/s as" in markdown(found)
    found.preloaded = {"vllm": []}
    assert "vLLM with no library preloaded, and Quire's tok/s as" in markdown(found)


def test_who_is_measured_in_which_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str]] = []
    monkeypatch.setattr(compare, "measure", lambda threads: Limits(threads, 1.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(compare, "_measure_one", lambda *given: measured.append((given[3], given[2])))
    everyone = ("quire", "unpacked", *PEERS, "hf")
    plan = compare.Plan(everyone, ("float32", "int8"), (1,), (8,), 8, 1, {}, tmp_path, 2)
    compare.compare(plan, Comparison(), lambda text: None)
    assert [name for precision, name in measured if precision == "float32"] == list(everyone)
    assert [name for precision, name in measured if precision == "int8"] == [
        "quire",
        "vllm",
        "llamacpp",
        "ray",
        "dynamo",
    ]


def test_a_file_that_could_not_be_written_is_told_and_is_not_there(tmp_path: Path) -> None:
    quantize = tmp_path / "llama-quantize"
    quantize.write_text('#!/bin/sh\necho begun > "$3"\necho "no such type" >&2\nexit 1\n')
    quantize.chmod(0o755)
    with pytest.raises(QuireError, match="no such type"):
        gguf_file(tmp_path / "weights", "bfloat16", quantize)
    assert not (tmp_path / "weights" / "bfloat16.gguf").exists()


def test_memory_is_looked_at_around_one_stream_while_its_server_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    events, speeds = list[str](), iter((10.0, 30.0))
    given = served(0, "quire", EIGHT, 150.0, 50.0)

    @contextlib.contextmanager
    def stopped(process: object) -> Iterator[None]:
        events.append("stop")
        yield
        events.append("go on")

    def look(memory: object, num_threads: int) -> float:
        assert num_threads == 2
        events.append("look")
        return next(speeds)

    def load() -> Served:
        events.append("load")
        return given

    monkeypatch.setattr(compare, "readable", lambda num_bytes: None)
    monkeypatch.setattr(compare, "paused", stopped)
    monkeypatch.setattr(compare, "reading_gb_per_s", look)
    monkeypatch.setattr(compare, "wait_until_at_rest", lambda process: events.append("rest"))
    found = compare.beside_memory(load, psutil.Process(), 2)
    assert events == ["stop", "look", "go on", "rest", "load", "stop", "look", "go on"]
    assert found == replace(given, memory_gb_per_s=20.0)


def test_the_speed_of_memory_is_the_median_of_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that end 0.1, 0.2 and 0.6 s after the first begins, of 4,000 bytes each; nothing is between them."""
    clock = iter((0.0, 0.0, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.6, 0.6))
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    memory = readable(4_000)
    assert memory.sum() == 1_000
    assert reading_gb_per_s(memory, torch.get_num_threads()) == pytest.approx(4e-5)
    assert next(clock, None) is None


def test_a_share_of_the_limit_counts_tokens_and_not_events() -> None:
    timing = RequestTiming(0.0, 2.0, (1.0, 1.8, 2.0), num_prompt_tokens=128, num_output_tokens=11)
    kept = Served.of(summarize([timing], 1), 0, "quire", "float32", ONE)
    assert (kept.itl_ms, kept.tpot_ms) == (pytest.approx(500.0), pytest.approx(100.0))
    only = Comparison(
        limits=[Limits(2, 20.0, 40.0, 0.2, 0.4)],
        packed_bytes={"float32": 500_000_000},
        served=[replace(kept, memory_gb_per_s=10.0)],
    )
    assert "| float32 | quire | 10.0 | 10.0 | 20.0 | **50%** |" in markdown(only)


def test_answers_that_must_not_be() -> None:
    assert faults(comparison()) == []
    unsteady = comparison()
    unsteady.answers["quire float32"][1] = [[1, 2], [5]]
    assert faults(unsteady) == ["quire float32 answers differently from one round to the next"]
    wrong = comparison()
    wrong.answers["quire float32"] = [[[1, 2], [5]]] * 2
    assert faults(wrong) == ["quire float32 does not answer as transformers does"]


def test_a_checkpoint_in_int8_is_the_model_rounded_by_rows(tmp_path: Path) -> None:
    """What vLLM is given: linear layers with a scale for each row, all else in bfloat16, and a configuration that says
    so."""
    folder = export(tmp_path / "int8", "int8")
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (group,) = config["quantization_config"]["config_groups"].values()
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    in_int8 = {name for name, weight in weights.items() if weight.dtype == torch.int8}
    assert len(in_int8) == 7 * config["num_hidden_layers"]
    scales = {f"{name}_scale" for name in in_int8}
    with open_checkpoint(load_model_info(ModelConfig())) as sources:
        assert weights.keys() == sources.keys() | scales
        for name, source in sources.items():
            numbers = source.read(tuple(slice(0, size) for size in source.shape))
            if name not in in_int8:
                assert torch.equal(weights[name], numbers.bfloat16()), name
                continue
            assert name.endswith("_proj.weight")
            scale, codes = weights[f"{name}_scale"], weights[name].float()
            assert (scale.dtype, scale.shape) == (torch.bfloat16, (len(codes), 1))
            assert ((codes * scale.float() - numbers).abs() <= 0.501 * scale.float()).all(), name


def test_shared_prefix_is_put_on_the_second_level() -> None:
    assert workloads((32, 1, 8), 64)[-2:] == [
        Workload(8, 24, 512, 32, 64),
        Workload(8, 16, 0, 128, 64, is_sampled=True),
    ]
    assert [w.num_requests for w in workloads((1, 8, 32), 128)] == [8, 16, 32, 24, 16]


@pytest.mark.parametrize(
    ("ask", "path", "answer"),
    [
        (answers.ask_openai, "/v1/completions", {"choices": [{"token_ids": [1, 2]}]}),
        (answers.ask_dynamo, "/v1/completions", {"nvext": {"completion_token_ids": [1, 2]}}),
        (answers.ask_sglang, "/generate", {"output_ids": [1, 2]}),
        (answers.ask_llamacpp, "/completion", {"tokens": [1, 2]}),
    ],
)
def test_ids_of_an_answer(
    ask: answers.Ask, path: str, answer: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def urlopen(request: str | urllib.request.Request, timeout: float) -> io.BytesIO:
        if isinstance(request, str):
            return io.BytesIO(b'{"data": [{"id": "smollm2"}]}')
        asked.append(request.full_url)
        assert isinstance(request.data, bytes)
        body = json.loads(request.data)
        assert "a prompt" in body.values()
        return io.BytesIO(json.dumps(answer).encode())

    monkeypatch.setattr(answers.urllib.request, "urlopen", urlopen)
    assert ask("http://server", "a prompt") == [1, 2]
    assert asked == [f"http://server{path}"]
