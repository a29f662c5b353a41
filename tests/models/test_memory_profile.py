"""Ranks of one host share its memory: what each is given, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_llama import make_tiny_llama
from torch.distributed import TCPStore

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import KVCacheSpec, block_bytes
from quire.engine.model_source import load_model_info
from quire.kernels.triton.attention import MOST_SUMS
from quire.workers import worker as worker_module
from quire.workers.layers.parameter import num_bytes
from quire.workers.memory_profile import check_weights_fit, kv_cache_bytes
from quire.workers.parallel import Grid, ParallelContext, Rendezvous, find_host_ranks, host_store
from quire.workers.worker import Worker, default_num_threads

GIB = 1 << 30
FREE = 16 * GIB
SPEC = KVCacheSpec(block_size=16, num_kv_heads=8, head_dim=128, dtype_bytes=2)
GRIDS = {
    "tensor": {"tensor_parallel_size": 4},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.workers.memory_profile.free_bytes", lambda device: FREE)


def cache_bytes(grid: dict[str, int], host_ranks: list[int] | None = None, device: str = "cpu", **cache: int) -> int:
    config = EngineConfig.model_validate({"model": {"model": "m"}, "cache": cache, "parallel": grid})
    return kv_cache_bytes(config, [SPEC] * 4, 1 << 17, torch.device(device), 0, host_ranks=host_ranks)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_cache_is_compared_with_what_all_ranks_of_the_host_want(grid: dict[str, int]) -> None:
    assert cache_bytes(grid, memory_bytes=4 * GIB) == 4 * GIB
    with pytest.raises(ConfigError, match=r"memory_bytes: .* per rank, .* on the 4 ranks of a host, .* are missing"):
        cache_bytes(grid, memory_bytes=4 * GIB + 1)
    per_block = block_bytes([SPEC] * 4, grid.get("pipeline_parallel_size", 1), 0)
    most = FREE // (4 * per_block)
    assert cache_bytes(grid, num_kv_blocks=most) == most * per_block
    with pytest.raises(ConfigError, match=r"num_kv_blocks: .* per rank, .* on the 4 ranks of a host, .* are missing"):
        cache_bytes(grid, num_kv_blocks=most + 1)
    assert cache_bytes(grid) == GIB  # a quarter of what is free, in four


def test_ranks_elsewhere_take_nothing_here() -> None:
    assert cache_bytes(GRIDS["both"], [2, 3], memory_bytes=8 * GIB) == 8 * GIB
    assert cache_bytes(GRIDS["both"], [2, 3]) == 2 * GIB
    with pytest.raises(ConfigError, match="on the 2 ranks of a host"):
        cache_bytes(GRIDS["both"], [2, 3], memory_bytes=8 * GIB + 1)
    with pytest.raises(ConfigError, match=r"17,179,869,185 bytes per rank does not fit: .* 1 are missing"):
        cache_bytes(GRIDS["both"], [2], memory_bytes=FREE + 1)


def test_a_gpu_is_its_ranks_alone() -> None:
    assert cache_bytes(GRIDS["tensor"], device="cuda", memory_bytes=FREE) == FREE


def test_stages_that_take_unequal_memory() -> None:
    """3 layers on 2 stages: a block takes two layers on one, one on the other."""
    config = EngineConfig.model_validate(
        {"model": {"model": "m"}, "cache": {"num_kv_blocks": 100}, "parallel": {"pipeline_parallel_size": 2}}
    )
    sizes = [100 * block_bytes([SPEC] * 3, 2, stage) for stage in range(2)]
    for missing in (0, 1):
        reserved = FREE - sum(sizes) + missing
        arguments = config, [SPEC] * 3, 4096, torch.device("cpu"), 0, reserved
        if missing:
            with pytest.raises(ConfigError, match=" 1 are missing"):
                kv_cache_bytes(*arguments)
        else:
            assert [kv_cache_bytes(*arguments, stage=stage) for stage in range(2)] == sizes


def test_ranks_find_those_of_their_host() -> None:
    hosted = host_store("127.0.0.1", 3)
    stores = [hosted, *(TCPStore("127.0.0.1", hosted.port, 3, wait_for_workers=False) for _ in range(2))]
    meeting = Rendezvous("127.0.0.1", hosted.port, generation=2)
    with ThreadPoolExecutor(3) as ranks:
        found = [
            ranks.submit(find_host_ranks, store, meeting, rank, 3, address)
            for rank, (store, address) in enumerate(zip(stores, ("10.0.0.1", "10.0.0.2", "10.0.0.1"), strict=True))
        ]
        assert [each.result(30) for each in found] == [[0, 2], [1], [0, 2]]


def test_weights_that_do_not_fit_together() -> None:
    cpu = torch.device("cpu")
    check_weights_fit([6 * GIB, 4 * GIB], 10 * GIB, cpu, "m")
    with pytest.raises(ConfigError, match=r"take 10,737,418,240 bytes on the 2 ranks of a host; .* 1 are missing"):
        check_weights_fit([6 * GIB, 4 * GIB], 10 * GIB - 1, cpu, "m")


@pytest.mark.parametrize("host_ranks", [None, [1, 2]])
def test_ranks_count_the_weights_of_those_beside_them(
    tmp_path: Path, host_ranks: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one stage and of the other are not the same: the first has the embedding."""
    make_tiny_llama(tmp_path)
    config = EngineConfig(model=ModelConfig(model=str(tmp_path), device="cpu"))
    info, grid = load_model_info(config.model), Grid(tensor_size=2, num_stages=2)
    sizes: list[int] = []
    for rank in range(4):
        worker = Worker(config, info, ParallelContext(rank, grid))
        worker.load_model()
        sizes.append(num_bytes(worker.model.parameters()))
    assert sizes[0] != sizes[2]
    total = sum(sizes[rank] for rank in host_ranks or range(4))
    for free in (total, total - 1):
        monkeypatch.setattr(worker_module, "free_bytes", lambda device, free=free: free)
        worker = Worker(config, info, ParallelContext(1, grid, host_ranks=host_ranks))
        if free == total:
            worker.load_model()
        else:
            with pytest.raises(ConfigError, match=f"take {total:,} bytes on the .* 1 are missing"):
                worker.load_model()


def test_what_is_on_its_way_to_the_next_stage_counts_as_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 8 steps of the first stage are kept until the second takes them; one of them the measured peak has."""
    make_tiny_llama(tmp_path)
    model = {"model": str(tmp_path), "max_model_len": 40}  # so that no other step is as large
    sections = {"model": model, "scheduler": {"max_num_batched_tokens": 44, "max_num_seqs": 4}}
    config = EngineConfig.model_validate(
        {**sections, "scheduler": {**sections["scheduler"], "num_speculative_tokens": 0}}
    )
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: 0)
    sent: list[int] = []
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, *_, **__: sent.append(tensor.nbytes))
    worker = Worker(config, load_model_info(config.model), ParallelContext(0, Grid(num_stages=2)))
    worker.load_model()
    assert worker._measure_activations() == 7 * 44 * worker.model.spec.hidden_size * 4 + MOST_SUMS
    assert len(sent) > 8  # those that nobody took stay for so many steps
    assert max(sent) == 44 * worker.model.spec.hidden_size * 4


@pytest.mark.parametrize(("given", "expected"), [(None, 3), (2, 2)])
def test_weights_for_a_gpu_are_read_by_as_many_threads(
    tmp_path: Path, given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards there are as many as before: Ray starts a rank with one, and a GPU computes its steps."""
    make_tiny_llama(tmp_path)
    config = EngineConfig(model=ModelConfig(model=str(tmp_path), num_threads=given))
    worker = Worker(config, load_model_info(config.model), ParallelContext(0, Grid(tensor_size=2)))
    worker.device = torch.device("cuda", 0)
    for name in ("set_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(worker_module, "free_bytes", lambda device: FREE)
    monkeypatch.setattr(worker_module, "usable_cores", lambda: 6)
    loaded: list[int] = []
    monkeypatch.setattr(worker, "_loaded", lambda _blueprint: loaded.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        worker.load_model()
        assert loaded == [expected]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_threads_are_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "usable_cores", lambda: 6)
    assert [default_num_threads(num_ranks) for num_ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]
