"""Weights and caches of the host on pages of 2 MiB."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_llama import make_tiny_llama

from quire.engine.config import ModelConfig
from quire.engine.kv_cache_spec import KVCacheConfig, group_layers
from quire.engine.model_source import load_model_info
from quire.workers.blueprints import blueprint_of
from quire.workers.host_memory import gather_weights, zeros
from quire.workers.kv_cache import allocate_kv_cache
from quire.workers.layers.attention import KVScales
from quire.workers.parallel import ParallelContext

_HUGE_PAGE = 2 << 20


def _huge_bytes(address: int) -> int:
    """In pages of 2 MiB, of the mapping that an address is in, by proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def _has_huge_pages() -> bool:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return switch.exists() and "[never]" not in switch.read_text()


@pytest.mark.skipif(sys.platform != "linux" or not _has_huge_pages(), reason="the system has none")
def test_memory_is_in_huge_pages_once_it_is_touched() -> None:
    memory = zeros(5 * _HUGE_PAGE)
    before = _huge_bytes(memory.data_ptr())  # others may be in the same mapping
    memory[::4096] = 1
    added = _huge_bytes(memory.data_ptr()) - before
    assert 4 * _HUGE_PAGE <= added <= 5 * _HUGE_PAGE  # the system may be short of one


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("num_bytes", [0, 1, 4097, _HUGE_PAGE + 64])
def test_memory_is_zero_and_aligned(num_bytes: int, part: float) -> None:
    memory = zeros(num_bytes, part)
    assert memory.shape == (num_bytes,)
    assert memory.dtype == torch.uint8
    assert not memory.any()
    assert num_bytes == 0 or sys.platform != "linux" or memory.data_ptr() % _HUGE_PAGE == part * _HUGE_PAGE
    memory.fill_(255)  # to its last byte


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere NumPy gives it")
def test_no_two_layers_of_a_cache_come_to_a_new_page_at_once(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    info = load_model_info(ModelConfig(model=str(tmp_path)))
    model = blueprint_of(info).build(ParallelContext())
    specs = model.kv_cache_specs(16, torch.float32)
    config = KVCacheConfig(40, 16, group_layers(specs, 1))
    caches = allocate_kv_cache(
        config, specs, [KVScales()] * len(specs), model.own_layers, torch.float32, torch.device("cpu")
    )
    places = sorted(cache.key.data_ptr() % _HUGE_PAGE for cache in caches)
    assert len(places) == 3
    assert all(after - before >= _HUGE_PAGE // 4 for before, after in pairwise([*places, _HUGE_PAGE]))


def test_weights_lie_in_one_piece_side_by_side(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=True)
    info = load_model_info(ModelConfig(model=str(tmp_path)))
    blueprint = blueprint_of(info)
    model = blueprint.build(ParallelContext())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    gather_weights(model.parameters())
    blueprint.load(model, info, progress=False)
    expected = blueprint.build(ParallelContext())
    blueprint.load(expected, info, progress=False)

    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert model.head.weight is model.embedding.weight
    down = model.layers["0"].mlp.down.weight
    assert (down.shape[1], down.stride(0)) == (70, 72)
    assert not down.as_strided((len(down), 72), (72, 1))[:, 70:].any()
    # Rows of float32 that are not whole quarters of a vector have zeros behind them.
    places = sorted((each.data_ptr(), len(each) * each.stride(0) * each.itemsize) for each in model.parameters())
    gaps = [later - (place + size) for (place, size), (later, _) in pairwise(places)]
    assert all(0 <= gap < 64 for gap in gaps)
