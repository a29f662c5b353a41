"""Operators of torch as compiled calls: the same bits, and none where they would not be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import operators
from quire.kernels.cpu.any_rows import capture as capture_any_rows
from quire.kernels.cpu.graph import Pool, capture
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.threads import run_call
from quire.kernels.elementwise import angles, rms_norm

COPY, ADD = torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor
EMBEDDING, INDEX_SELECT = torch.ops.aten.embedding.out, torch.ops.aten.index_select.out
ROWS = {"one": 1, "some": 13, "many": 301}


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def call(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether it is compiled; then it is called."""
    compiled = operators.compiled(partial(func, *args, **kwargs))
    if compiled is not None:
        run_call(compiled)
    return compiled is not None


def bits(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all, as far as `dtype` has them: also infinities and both kinds of NaN."""
    if dtype == torch.bool:
        return torch.rand(num_rows, size) < 0.5
    raw = torch.randint(256, (num_rows, size * dtype.itemsize), dtype=torch.uint8)
    raw[0, -dtype.itemsize :] = 0
    raw[0, -2:] = torch.tensor([0x81, 0x7F], dtype=torch.uint8)  # a NaN of bfloat16 and float32 that signals
    return raw.view(dtype)


@pytest.mark.parametrize("num_rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 33), (torch.bfloat16, 34), (torch.float16, 2), (torch.int64, 1), (torch.int32, 7),
        (torch.bool, 8), (torch.uint8, 64),
    ],
)  # fmt: skip
def test_copies_of_any_bits(dtype: torch.dtype, size: int, num_rows: int) -> None:
    """Also from and to rows that are a part of longer ones, whose other parts stay."""
    given = bits(num_rows, 3 * size, dtype)
    x, whole = given[:, size : 2 * size], torch.zeros(num_rows, 2 * size, dtype=dtype)
    assert call(COPY, whole[:, size:], x)
    assert torch.equal(whole[:, size:].contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))
    assert not whole[:, :size].any()


@pytest.mark.parametrize("num_rows", ROWS.values(), ids=ROWS)
def test_a_copy_that_widens(num_rows: int) -> None:
    x, out = torch.randn(num_rows, 5, 7).bfloat16(), torch.empty(num_rows, 5, 7)
    x[0, 0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    assert call(COPY, out, x)
    torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(dtype: torch.dtype, num_rows: int) -> None:
    x, out = torch.randn(num_rows, 66).to(dtype), torch.randn(num_rows, 33).to(dtype)
    x[0, :2] = torch.tensor([float("inf"), float("nan")])
    expected = out + x[:, :33]
    assert call(ADD, out, x[:, :33])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_what_torch_goes_on_doing() -> None:
    """Other types, sums with a factor, numbers and rows that are repeated, rows in several pieces, and nothing."""
    x, half = torch.randn(6, 8), torch.randn(6, 8).bfloat16()
    for func, args, kwargs in [
        (COPY, (half, x), {}),
        (COPY, (x.long(), x), {}),
        (COPY, (torch.zeros(6, 3, dtype=torch.bool), x[:, :3] > 0), {}),
        (COPY, (torch.empty(6, 8), x[0]), {}),
        (COPY, (torch.empty(8, 6, 2).transpose(1, 2), x.view(8, 2, 3).repeat(1, 1, 2)), {}),
        (COPY, (torch.empty(()), torch.ones(())), {}),
        (COPY, (torch.empty(0, 8), x[:0]), {}),
        (COPY, (torch.empty(6, 8), x, True), {}),
        (ADD, (x, half), {}),
        (ADD, (x, 1.0), {}),
        (ADD, (x, x.clone()), {"alpha": 2}),
        (ADD, (torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)), {}),
    ]:
        assert not call(func, *args, **kwargs)


def forward(x: Tensor, bias: Tensor) -> Tensor:
    hidden = rms_norm(x, torch.ones(x.shape[1], dtype=x.dtype), 1e-5)
    kept = hidden.clone()
    hidden += x
    return (hidden.add_(bias.clone()) + kept).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_with_them_repeats_what_it_does(dtype: torch.dtype) -> None:
    """Of one number of rows, and of any: what is not by rows is left to torch."""
    x, each, same = torch.randn(99, 64).to(dtype), torch.randn(33, 64).to(dtype), torch.randn(64).to(dtype)
    out = torch.empty(33, 64)
    with torch.inference_mode():
        replay = capture(lambda: out.copy_(forward(x[:33], each)), Pool())
        record, _ = capture_any_rows(lambda: (forward(x[:33], same),), Pool(), 33, 99, [x])
        for _ in range(3):
            x.copy_(torch.randn(99, 64))
            replay()
            assert torch.equal(out, forward(x[:33], each))
            for num_rows in (1, 33, 99, 64):
                assert torch.equal(record.replay(num_rows)[0], forward(x[:num_rows], same))


@pytest.mark.parametrize("num_rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 33), (torch.bfloat16, 34), (torch.int32, 7)])
def test_rows_that_are_looked_up(dtype: torch.dtype, size: int, num_rows: int) -> None:
    """Of one table, and at once of several; with the first and the last row, and some twice."""
    tables = bits(3 * 50, size, dtype).view(3, 50, size)
    places = torch.randint(50, (num_rows,))
    places[0], places[-1] = 0, 49
    of_one, of_each = torch.zeros(num_rows, size, dtype=dtype), torch.zeros(3, num_rows, size, dtype=dtype)
    assert call(EMBEDDING, tables[1], places, out=of_one)
    assert call(INDEX_SELECT, tables, 1, places, out=of_each)
    raw = tables.view(torch.uint8)
    assert torch.equal(of_one.view(torch.uint8), raw[1][places])
    assert torch.equal(of_each.view(torch.uint8), raw[:, places])


def test_nothing_beside_a_table_is_looked_up() -> None:
    table, out = torch.arange(8.0).view(4, 2), torch.zeros(3, 2)
    assert call(EMBEDDING, table, torch.tensor([-5, 1, 1 << 40]), out=out)
    assert torch.equal(out, table[[0, 1, 3]])


def test_what_is_looked_up_otherwise() -> None:
    table, places, out = torch.rand(4, 6), torch.tensor([1, 2]), torch.zeros(2, 6)
    assert not call(EMBEDDING, table[:, ::2], places, out=out[:, :3].contiguous())
    assert not call(EMBEDDING, table, places.int(), out=out)
    assert not call(
        EMBEDDING, table.to(torch.uint8)[:, :3].contiguous(), places, out=out.to(torch.uint8)[:, :3].contiguous()
    )
    assert not call(INDEX_SELECT, table, 0, places, out=out)
    assert not call(EMBEDDING, table, places[:0], out=out[:0])


def test_a_graph_begins_with_them() -> None:
    """And reads what its inputs are when it runs."""
    table, places, weight = torch.rand(40, 16), torch.tensor([3, 30, 7]), torch.rand(16)
    positions, inv_freq, out = torch.tensor([1, 2, 900]), torch.rand(4), torch.zeros(3, 24)

    def run() -> None:
        x = torch.nn.functional.embedding(places, table)
        cos, sin = angles(positions, inv_freq)
        out.copy_(torch.cat([rms_norm(x, weight, 1e-5), cos, sin], dim=1))

    graph = capture(run, Pool())
    first = graph._actions[0]
    assert isinstance(first, Program)
    assert len(first._calls) == 3
    places.copy_(torch.tensor([5, 39, 0]))
    positions.add_(5)
    graph()
    expected = torch.cat([rms_norm(table[places], weight, 1e-5), *angles(positions, inv_freq)], dim=1)
    assert torch.equal(out, expected)
