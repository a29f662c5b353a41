"""Decode steps recorded on CPU compute what the same steps do call by call; what cannot be recorded is computed so."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from core_driver import Driver
from graph_checks import BLOCK_SIZE, make_model, make_runner, steps_of, tokens_of
from inflight_executor import CountedBackend
from test_sampling import NUM_TOKENS
from tiny_llama import make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.kv_cache_spec import group_layers
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams
from quire.kernels import fp8, ops
from quire.kernels.cpu import program
from quire.kernels.cpu.graph import Pool, capture
from quire.kernels.cpu.recording import NotCapturableError, recorder
from quire.kernels.elementwise import rms_norm
from quire.workers.local_executor import LocalExecutor


@pytest.fixture(params=[(1, 1), (2, 1), (2, 0)], ids=["1-thread", "2-threads", "2-that-do-not-wait"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that do not wait compute all the time what another is just computing, and go on without it."""
    before, (num_threads, patience) = torch.get_num_threads(), request.param
    monkeypatch.setattr(program, "LEAST_PATIENCE", patience * program.LEAST_PATIENCE)
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_recorded_steps_sample_the_same(dtype: torch.dtype) -> None:
    """Batches grow, shrink and come back, so that graphs of several sizes use the same memory in turns."""
    model, backend = make_model(torch.device("cpu"), dtype), CountedBackend()
    num_groups = len(group_layers(model.kv_cache_specs(BLOCK_SIZE, dtype), 1))
    eager, recorded = (make_runner(model, 12, torch.device("cpu")) for _ in range(2))
    recorded.record_graphs(backend, most=11)
    batches = (3, 11, 1, 3, 8, 11, 12)  # one more than is recorded
    for num_reqs in batches:
        expected, found = (tokens_of(runner, steps_of(num_reqs, num_groups)) for runner in (eager, recorded))
        assert len(np.unique(expected[:, 0])) >= 3
        np.testing.assert_array_equal(found, expected)
    assert backend.num_captured == 4
    assert backend.num_replays >= 7 * len(batches)


@pytest.mark.parametrize(
    ("sections", "is_recorded"),
    [
        ({}, True),
        ({"quantization": "int8"}, True),
        ({"enforce_eager": True}, False),
        ({"dtype": "float16"}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, True),
    ],
    ids=["float32", "int8", "enforce_eager", "float16", "fp8-cache"],
)
def test_the_executor_records_what_it_can(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, sections: dict, is_recorded: bool
) -> None:
    backend = CountedBackend()
    monkeypatch.setattr("quire.workers.cpu_graphs.CpuGraphBackend", lambda: backend)
    make_tiny_llama(tmp_path, initializer_range=0.12)
    cache = {"cache": {"kv_cache_dtype": sections.pop("kv_cache_dtype")}} if "kv_cache_dtype" in sections else {}
    answers = []
    for eager in (True, False):
        model = {"model": str(tmp_path), "num_threads": 1, "device": "cpu", "enforce_eager": eager, **sections}
        config = EngineConfig.model_validate({"model": model, **cache})
        executor = LocalExecutor(config, load_model_info(ModelConfig(model=str(tmp_path))))
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        requests = [
            EngineRequest(request_id=str(i), prompt_token_ids=list(range(1, 9 + i)), sampling_params=params, seed=0)
            for i in range(3)
        ]
        answers.append([answer.token_ids for answer in Driver(executor, 256).run(requests)])
    assert answers[0] == answers[1]
    assert (backend.num_replays > 0) == is_recorded


@pytest.mark.parametrize("window", [None, 300])
def test_a_recorded_attention_follows_its_contexts(window: int | None) -> None:
    """From one chunk each to many more items than there was room for, and back."""
    num_reqs, block_size, max_blocks = 3, 16, 200
    generator = torch.Generator().manual_seed(3)
    caches = torch.randn(2, num_reqs * max_blocks, block_size, 2, 16, generator=generator)
    table = torch.randperm(num_reqs * max_blocks, generator=generator, dtype=torch.int32).view(num_reqs, max_blocks)
    query, out = torch.randn(num_reqs, 4, 16, generator=generator), torch.empty(num_reqs, 4, 16)
    starts, seq_lens = torch.arange(num_reqs + 1, dtype=torch.int32), torch.zeros(num_reqs, dtype=torch.int32)
    slots = torch.full((num_reqs,), -1)

    def run() -> None:
        metadata = ops.AttentionMetadata(starts, seq_lens, table, slots, starts.numpy(), seq_lens.numpy())
        out.copy_(ops.paged_attention(query, *caches, metadata, scale=0.25, sliding_window=window))

    with torch.inference_mode():
        seq_lens.copy_(torch.tensor([5, 20, 1]))
        replay = capture(run, Pool())
        for lengths in ([6, 21, 2], [3_000, 255, 257], [256, 3_199, 3_200], [1, 7, 40]):
            seq_lens.copy_(torch.tensor(lengths))
            replay()
            found = out.clone()
            run()
            assert torch.equal(found, out)


def test_a_second_recording_takes_no_more_memory() -> None:
    """What the first one took, results of operators included, went back; they still compute the same."""
    x, out = torch.randn(40, 64), torch.empty(40, 64)

    class Counted(Pool):
        num_blocks = 0

        def like(self, tensor: torch.Tensor) -> torch.Tensor:
            free = sum(map(len, self._free.values()))
            lent = super().like(tensor)
            self.num_blocks += sum(map(len, self._free.values())) == free
            return lent

    def run() -> None:
        product = (x.to(torch.bfloat16).float() @ x.T).softmax(dim=1)
        out.copy_(rms_norm(product @ x, torch.ones(64), 1e-5).exp())

    pool = Counted()
    with torch.inference_mode():
        replays = [capture(run, pool)]
        num_blocks = pool.num_blocks
        replays.append(capture(run, pool))
        assert pool.num_blocks == num_blocks > 0
        for replay in replays:
            x.mul_(0.7).add_(0.1)
            replay()
            found = out.clone()
            run()
            assert torch.equal(found, out)


def test_memory_goes_back_when_nobody_has_it() -> None:
    pool = Pool()
    first = pool.like(torch.empty(5, 7))
    address, view = first.data_ptr(), first[2:, 1]
    del first
    other = pool.like(torch.empty(5, 7))
    assert other.data_ptr() != address
    del view
    assert pool.like(torch.empty(7, 5)).data_ptr() == address
    strided = pool.like(torch.empty_strided((3, 4), (1, 3), dtype=torch.bfloat16))
    assert (strided.shape, strided.stride(), strided.dtype) == ((3, 4), (1, 3), torch.bfloat16)


def test_a_graph_keeps_no_copy_of_a_weight() -> None:
    """What the CPU cannot multiply is widened anew each time: graphs are of up to 32 sizes."""
    weight, scales, bias = fp8.quantize(torch.randn(512, 64), 0.01), torch.rand(512), torch.randn(512)
    x, out = torch.randn(3, 64), torch.empty(3, 512)

    def run() -> None:
        """Between others whose memory is from the pool, and goes back to it."""
        normed = rms_norm(x, torch.ones(64), 1e-5)
        product = ops.linear_fp8(normed, weight, scales, bias)
        del normed
        out.copy_(rms_norm(product, torch.ones(512), 1e-5) + 1)

    def held() -> int:
        gc.collect()
        return sum(found.nbytes for found in gc.get_objects() if type(found) is torch.Tensor)

    with torch.inference_mode():
        before, replay = held(), capture(run, Pool())
        assert held() - before < weight.numel()
        first = out.clone()
        x.add_(torch.randn(3, 64))
        replay()
        found = out.clone()
        run()
    assert torch.equal(found, out)
    assert not torch.equal(found, first)


def test_operators_are_repeated_on_new_numbers() -> None:
    """New tensors, views of them, changes in place, and several results."""
    x, out = torch.arange(6.0).reshape(2, 3), torch.zeros(3)

    def run() -> None:
        high, low = (x * 2).aminmax(dim=0)
        total = torch.empty(3)
        total.copy_(high)
        total.view(3, 1)[1:].add_(low[1:, None])
        out.copy_(total)

    with torch.inference_mode():
        replay = capture(run, Pool())
        first = out.clone()
        x.mul_(3).add_(1)
        replay()
        second = out.clone()
        run()
    assert first.tolist() == [0.0, 10.0, 14.0]
    assert second.tolist() == out.tolist() != first.tolist()


def test_a_graph_keeps_its_memory() -> None:
    """What a compiled call wrote into memory of the pool is read by the next one, though nobody else has the pool."""
    x, weight, out = torch.randn(2, 64), torch.ones(64), torch.zeros(2, 64)
    with torch.inference_mode():
        replay = capture(lambda: out.copy_(rms_norm(rms_norm(x, weight, 1e-5), weight, 1e-5)), Pool())
        expected = out.clone()
        out.zero_()
        scratch = [torch.full((2, 64), 7.0) for _ in range(64)]
        replay()
    assert torch.equal(out, expected)
    assert len(scratch) == 64


@pytest.mark.parametrize(
    "run", [lambda x: x[x > 1], lambda x: int(x.min()), lambda x: x.bincount()], ids=["mask", "item", "bincount"]
)
def test_what_depends_on_numbers_is_refused(run: Callable[[torch.Tensor], object]) -> None:
    with torch.inference_mode(), pytest.raises(NotCapturableError, match="depends on numbers"):
        capture(lambda: run(torch.tensor([1, 2, 3])), Pool())
    assert recorder() is None


def test_recording_imports_no_compiler() -> None:
    """`torch._dynamo` and what it needs take one to two seconds, which a service's first answer would wait for."""
    code = (
        "import sys, torch\n"
        "from quire.kernels.cpu.graph import Pool, capture\n"
        "x = torch.zeros(4)\n"
        "repeat = capture(lambda: x.add_(1), Pool())\n"
        "repeat()\n"
        "print(x.tolist(), 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[2.0, 2.0, 2.0, 2.0] False"
