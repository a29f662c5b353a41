"""The table of tile sizes: every kernel finds an entry, and what is measured replaces what was there."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from quire.kernels.packed import BLOCK, ROWS
from quire.kernels.triton import devices, tiles
from quire.kernels.triton.attention import SPLIT
from quire.workers.kernel_bench.tune import Job, fastest_of, jobs

CPU = torch.device("cpu")
PACKED = [*product(("packed", "packed_moe"), (1, 16, 17, 33, 5000), (torch.float32, torch.bfloat16))]


@pytest.fixture(params=[None, (8, 6), (9, 0)], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "capability", lambda _device: request.param)


@pytest.mark.usefixtures("capability")
def test_every_kernel_finds_its_tile() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for short, head_dim, dtype, fp8, block_size in product(
        (True, False), (16, 80, 128, 256), dtypes, (True, False), (16, 256)
    ):
        tile = tiles.attention(CPU, short=short, head_dim=head_dim, dtype=dtype, fp8=fp8, block_size=block_size)
        assert SPLIT % tile.block_n == 0
        assert not short or tile.block_m == 16, "what is short is told by this"
    for kernel, rows, dtype in product(("weight8", "moe", "packed", "packed_moe"), (0, 1, 17, 33, 5000), dtypes):
        assert tiles.gemm(CPU, kernel, num_rows=rows, dtype=dtype).block_m <= max(16, 2 * rows)
    for num_features in (1, 2048, 2049, 8192, 1_000_000):
        assert tiles.row(CPU, num_features).block_n <= 16
    packed = [tiles.packed_row(CPU)]
    packed += [tiles.gemm(CPU, kernel, num_rows=rows, dtype=dtype) for kernel, rows, dtype in PACKED]
    for each in packed:
        assert each.block_n % ROWS == each.block_k % BLOCK == 0, "whole panels and blocks"


def test_a_detail_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "attention.short.d128.bf16"
    table = {"any": {name: [16, 64, 4, 2], f"{name}.block256": [16, 128, 8, 3]}}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    found = [
        tiles.attention(CPU, short=True, head_dim=128, dtype=torch.bfloat16, fp8=False, block_size=size).block_n
        for size in (16, 256)
    ]
    assert found == [64, 128]


def test_the_fastest_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Entries that were not measured stay, and the file is one that it would write again."""
    path = tmp_path / "tiles.json"
    path.write_text(tiles.PATH.read_text())
    monkeypatch.setattr(tiles, "PATH", path)
    entry = "moe.m16.bf16"
    slow, fast, broken = (tiles.GemmTile(16, 64, size, 4, 3) for size in (32, 128, 256))
    times = {slow: 2.0, fast: 1.0, broken: float("inf")}

    def seconds(_work: object) -> float:
        return times[tiles.gemm(CPU, "moe", num_rows=3, dtype=torch.bfloat16)]

    chosen = fastest_of(Job("experts", entry, list(times), lambda: lambda: None), seconds)
    assert chosen == fast
    assert fastest_of(Job("experts", entry, [broken], lambda: lambda: None), seconds) is None
    before = tiles.read()
    tiles.write_section("sm90", {entry: chosen}, "in a test")
    after = tiles.read()
    assert after["sm90"]["tiles"] == {**before["sm90"]["tiles"], entry: [16, 64, 128, 4, 3]}
    assert after["sm90"]["source"] == before["sm90"]["source"], "of the others"
    assert after["sm90"]["measured"] == {**before["sm90"]["measured"], entry: "in a test"}
    assert after["any"] == before["any"]
    assert path.read_text() == tiles.format_table(after)
    tiles.write_section("sm100", {entry: fast}, "in another")
    assert tiles.read()["sm100"]["tiles"] == {**before["any"]["tiles"], entry: [16, 64, 128, 4, 3]}
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.json"]
    tiles._table.cache_clear()


def test_tuning_names_entries_that_there_are() -> None:
    assert {job.entry for job in jobs(CPU)} <= set(tiles.read()["sm90"]["tiles"])
    assert [job.entry for job in jobs(CPU, ["experts"])] == [
        f"{kernel}.m{rows}.bf16" for kernel in ("moe", "packed_moe") for rows in (16, 32, 64, 128)
    ]
    assert not jobs(CPU, ["draw"])
