"""A record of some rows repeated with others computes what the forward does; what it cannot tell is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels import fp8, ops
from quire.kernels.cpu import few_rows
from quire.kernels.cpu.any_rows import capture
from quire.kernels.cpu.graph import Pool
from quire.kernels.cpu.intrinsics import IS_X86
from quire.kernels.cpu.recording import NotCapturableError, recorder
from quire.kernels.cpu.tiles import best_format
from quire.kernels.elementwise import activate_and_mul, rms_norm

NUM_ROWS, MOST_ROWS, SIZE = 41, 163, 64
WEIGHT, NARROW = torch.randn(2 * SIZE, SIZE), torch.randn(SIZE, SIZE)
ONES = torch.ones(SIZE)

pytestmark = pytest.mark.skipif(not IS_X86, reason="linear layers of any number of rows are compiled on x86 alone")


def forward(x: Tensor, ids: Tensor) -> Tensor:
    """Compiled calls and operators, on new tensors, views, in place, and with several results."""
    hidden = NARROW.index_select(0, ids)
    hidden += x
    heads = rms_norm(hidden.view(len(x), 4, 16), torch.ones(16), 1e-5)
    high, _ = heads.flatten(1).sort(dim=1)
    gated = activate_and_mul(ops.linear(rms_norm(high, ONES, 1e-5), WEIGHT), "silu")
    gated[:, :8].mul_(0.5).add_(torch.arange(8.0))
    return hidden.add_(ops.linear(gated, NARROW), alpha=0.3)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_any_number_of_rows(num_threads: int) -> None:
    x, ids = torch.randn(MOST_ROWS, SIZE), torch.randint(SIZE, (MOST_ROWS,))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            record, (first,) = capture(
                lambda: (forward(x[:NUM_ROWS], ids[:NUM_ROWS]),), Pool(), NUM_ROWS, MOST_ROWS, [x, ids]
            )
            assert torch.equal(first, forward(x[:NUM_ROWS], ids[:NUM_ROWS]))
            assert record.least_rows == 25
            for num_rows in (MOST_ROWS, 25, 26, 32, 33, 48, 100, NUM_ROWS, 162):
                x.copy_(torch.randn(MOST_ROWS, SIZE))
                ids.copy_(torch.randint(SIZE, (MOST_ROWS,)))
                found = record.replay(num_rows)[0].clone()
                assert torch.equal(found, forward(x[:num_rows], ids[:num_rows]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_int8", [False, True])
def test_few_rows(in_int8: bool, dtype: torch.dtype) -> None:
    """They are another kernel's than many: on a CPU with matrix tiles up to four, elsewhere up to 48."""
    if in_int8 and dtype == torch.bfloat16 and best_format("int8 dot", "int8") == "int8":
        pytest.skip("this CPU multiplies few such rows as numbers")
    x = torch.randn(MOST_ROWS, SIZE).to(dtype)
    weight = torch.randint(-127, 128, (2 * SIZE, SIZE)).to(torch.int8 if in_int8 else dtype)
    scales = torch.rand(2 * SIZE)

    def run(x: Tensor) -> Tensor:
        return ops.linear_int8(x, weight, scales) if in_int8 else ops.linear(x, weight)

    with torch.inference_mode():
        (few, (first,)), (many, _) = (capture(lambda n=n: (run(x[:n]),), Pool(), n, MOST_ROWS, [x]) for n in (3, 53))
        assert torch.equal(first, run(x[:3]))
        assert (few.least_rows, few.most_rows + 1, many.most_rows) == (1, many.least_rows, MOST_ROWS)
        for num_rows in range(few.least_rows, few.most_rows + 1):
            x.copy_(torch.randn(MOST_ROWS, SIZE))
            assert torch.equal(few.replay(num_rows)[0], run(x[:num_rows]))


def test_records_share_memory() -> None:
    """Each has results of its own, and intermediate memory of all."""
    x, pool = torch.randn(MOST_ROWS, SIZE), Pool()

    def run() -> tuple[Tensor, Tensor]:
        added = rms_norm(x[:NUM_ROWS], ONES, 1e-5) + 1
        return added, rms_norm(added, ONES, 1e-5)

    with torch.inference_mode():
        one, _ = capture(run, pool, NUM_ROWS, MOST_ROWS, [x])
        other, _ = capture(run, pool, NUM_ROWS, MOST_ROWS, [x])
        first = one.replay(50)
        kept = [each.clone() for each in first]
        x.mul_(torch.randn(MOST_ROWS, 1))
        second = other.replay(60)
    for result, of_one, of_other in zip(first, kept, second, strict=True):
        assert torch.equal(result, of_one)
        assert not torch.equal(of_other[:50], of_one)


def few(x: Tensor) -> Tensor:
    return few_rows.linear("float32", x, torch.randn(24, SIZE), None, None)  # which is not told that it is all


def widened(x: Tensor) -> Tensor:
    return ops.linear_fp8(x, fp8.quantize(WEIGHT, 0.01), torch.ones(len(WEIGHT)), None)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (few, "one number of rows"),
        (widened, "may be by rows"),
        (lambda x: x * torch.arange(NUM_ROWS)[:, None], "told the number of rows"),
        (lambda x: x + torch.zeros(NUM_ROWS, 1), "told the number of rows"),
        (lambda x: x.t().contiguous().t() + 1, "rows elsewhere"),
        (lambda x: (x + 1)[1:].exp(), "rows elsewhere"),
        (lambda x: (x + 1).view(-1, 8).exp(), "rows elsewhere"),
        (lambda x: (x + 1).view(-1, 8).exp().view(NUM_ROWS, SIZE), "rows elsewhere"),
        (lambda x: (x + 1)[:, :NUM_ROWS].exp(), "rows elsewhere"),
        (lambda x: torch.stack((x, x)).sum(0), "rows elsewhere"),
        (lambda x: x @ torch.randn(SIZE, NUM_ROWS), "rows elsewhere"),
        (lambda x: (x + 1).t(), "result"),
        (lambda x: (x + 1).sum(0), "result"),
        (lambda x: x[x[:, 0] > 0], "depends on numbers"),
    ],
    ids=lambda value: value.__name__.strip("<>") if callable(value) else "",
)
def test_what_it_cannot_tell_is_refused(run: Callable[[Tensor], Tensor], reason: str) -> None:
    x = torch.randn(MOST_ROWS, SIZE)
    with torch.inference_mode(), pytest.raises(NotCapturableError, match=reason):
        capture(lambda: (x[:NUM_ROWS], run(x[:NUM_ROWS])), Pool(), NUM_ROWS, MOST_ROWS, [x])
    assert recorder() is None


@pytest.mark.parametrize("shape", [(24, 64), (50, 172), (201, 64), (50, 71)])
def test_weights_of_odd_sizes(shape: tuple[int, int]) -> None:
    """One kernel takes any number of rows of them, so that they keep no prompt from being recorded."""
    weight = torch.randn(shape[0], -(-shape[1] // 4) * 4)[:, : shape[1]]
    x = torch.randn(40, shape[1])
    with torch.inference_mode():
        record, _ = capture(lambda: (ops.linear(x[:7] * 2, weight),), Pool(), 7, 40, [x])
        for num_rows in (1, 7, 33, 40):
            assert torch.equal(record.replay(num_rows)[0], ops.linear(x[:num_rows] * 2, weight))
