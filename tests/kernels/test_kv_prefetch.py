"""What attention reads is shared out among the products before it, and they go along their shares."""

from __future__ import annotations

import ctypes
import math
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Case, build
from numba import njit, types
from numba.extending import intrinsic
from test_packed import packed

from quire.kernels import ops
from quire.kernels.cpu import byte_dots, decode, dots, kv_prefetch, rounded_dots
from quire.kernels.cpu.attention_call import Layer, Shape
from quire.kernels.cpu.features import IS_WIDE
from quire.kernels.cpu.graph import LAG, Pool, Recorder, capture
from quire.kernels.cpu.kv_prefetch import (
    MOST_PIECES,
    NUM_WORDS,
    OF,
    PIECE,
    PIECES,
    Fetches,
    Lists,
    Reads,
    point_to_share,
    share_out,
)
from quire.kernels.cpu.linear import _packed_kernel
from quire.kernels.cpu.packed_call import SHARE
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recording import CompiledCall, as_one_action, recorded_by
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import PACKINGS


class Product:
    """As a record sees it. It fetches nothing if it has no weights."""

    def __init__(self, num_weights: int = 0) -> None:
        self.words = (ctypes.c_int64 * NUM_WORDS)()
        part = Fetches(ctypes.addressof(self.words), num_weights) if num_weights else None
        self.call = CompiledCall(None, None, None, prefetch=part)

    def pieces_of(self, item: int, num_items: int, num_threads: int) -> range:
        cursor = np.zeros(4, np.int64)
        point_to_share(cursor, ctypes.addressof(self.words), num_threads, item, num_items)
        return range(*((cursor[:2] - self.words[PIECES]) // 4).tolist())


def attention(num_pieces: np.ndarray, keys: int = 3 << 40) -> CompiledCall:
    reads = Reads(pieces=5 << 40, num_pieces=num_pieces.ctypes.data, keys=keys, values=4 << 40)
    return CompiledCall(None, None, None, prefetch=reads)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 9])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, MOST_PIECES])
def test_products_share_all_pieces_by_their_weights(num_threads: int, count: int) -> None:
    num_pieces = np.array([count])
    sizes = [(18, 331_776), (48, 1_769_472), (9, 884_736), (15, 552_960)]  # items, weights
    products = [Product(num_weights) for _, num_weights in sizes]
    share_out([*(each.call for each in products), Product().call, attention(num_pieces)])
    found: dict[int, list[int]] = {thread: [] for thread in range(num_threads)}
    for product, (num_items, num_weights) in zip(products, sizes, strict=True):
        fetched = 0
        for thread in range(num_threads):
            for item in range(thread * num_items // num_threads, (thread + 1) * num_items // num_threads):
                some = product.pieces_of(item, num_items, num_threads)
                found[thread] += some
                fetched += len(some)
        assert abs(fetched - count * num_weights / sum(weights for _, weights in sizes)) <= num_threads
    for thread, pieces in found.items():
        assert pieces == list(range(thread * count // num_threads, (thread + 1) * count // num_threads))


def test_each_product_has_the_attention_that_comes_next() -> None:
    nothing, products, num_pieces = Product(), [Product(100) for _ in range(4)], np.array([60])
    first, second = attention(num_pieces, keys=1), attention(num_pieces, keys=2)
    share_out([products[0].call, first, products[1].call, nothing.call, products[2].call, second, products[3].call])
    shares = [list(each.words)[2:] for each in products]
    assert shares == [[1, 4 << 40, 0, 100, 100], [2, 4 << 40, 0, 100, 200], [2, 4 << 40, 100, 200, 200], [0] * 5]
    assert list(nothing.words) == [0] * NUM_WORDS
    assert products[3].pieces_of(0, 4, 2) == range(0)


def test_of_fewer_items_than_threads_no_part_is_fetched_twice() -> None:
    product = Product(100)
    num_pieces = np.array([80])
    share_out([product.call, attention(num_pieces)])
    found = [piece for item in range(3) for piece in product.pieces_of(item, 3, 8)]
    assert len(found) == len(set(found)) == 30
    assert set(found) <= set(range(80))


def test_what_nobody_fetches_by_is_not_listed() -> None:
    class Arguments(ctypes.Structure):
        _fields_ = (("num_rows", ctypes.c_int64),)

    wanted, unwanted = (CompiledCall(None, Arguments(7), None, prefetch=Lists(place)) for place in (5 << 40, 6 << 40))
    product, nothing, num_pieces = Product(100), Product(), np.array([60])
    share_out([wanted, unwanted, attention(num_pieces), product.call, attention(num_pieces)])
    assert (wanted.arguments.num_rows, unwanted.arguments.num_rows) == (7, 0)
    share_out([wanted, nothing.call, attention(num_pieces), product.call])
    assert wanted.arguments.num_rows == 0


@intrinsic
def _fetch_two(typing_context: Any, cursor: Any) -> Any:
    def generate(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        kv_prefetch.fetch_pieces(b, arguments[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit
def _fetch(cursor: int, times: int) -> None:
    for _ in range(times):
        _fetch_two(cursor)


def test_a_share_is_gone_through_and_ends() -> None:
    """A place that nobody may read does no harm: what is fetched is not read."""
    pieces = np.array([0, 1 << 30, 2, 3, 4], np.int32)
    begin, end = pieces.ctypes.data, pieces.ctypes.data + 4 * 4
    cursor = np.array([begin, end, 0, pieces.ctypes.data], np.int64)
    places = []
    for _ in range(4):
        _fetch(cursor.ctypes.data, 1)
        places.append((cursor[0] - begin) // 4)
    assert places == [2, 4, 4, 4]
    assert cursor[1:].tolist() == [end, 0, pieces.ctypes.data]


def visible_pieces(blocks: np.ndarray, seq_len: int, window: int, block_pieces: int) -> list[int]:
    """Of the blocks that have a token that the last one attends to, up to the last one's end."""
    token_pieces = block_pieces / 16
    visible = {position // 16 for position in range(seq_len) if not window or position >= seq_len - window}
    ends = {block: min(16, seq_len - 16 * block) * token_pieces for block in visible}
    return [blocks[block] * block_pieces + i for block in sorted(visible) for i in range(math.ceil(ends[block]))]


@pytest.mark.parametrize(("window", "cache_bytes"), [(0, 4), (0, 2), (0, 1), (100, 4), (17, 2)])
def test_a_plan_lists_what_layers_read(window: int, cache_bytes: int) -> None:
    """Of requests with one token, in step after step; blocks have 48, 24 or 12 pieces."""
    rng, block_pieces = np.random.default_rng(1), 16 * 3 * 64 * cache_bytes // PIECE
    plan = decode.DecodePlan(Shape(9, 3, 64, 16, 0.1, window, 0.0, cache_bytes), most_reqs=5)
    table = rng.permutation(5 * 64).reshape(5, 64).astype(np.int32)
    starts, seq_lens = np.array([0, 1, 2, 7, 8, 9], np.int32), np.array([1, 16, 50, 130, 1000], np.int32)
    keys, values, query = torch.empty(1), torch.empty(1), torch.empty(1)
    layer = Layer(query, keys, values, query, None, 1.0, 1.0)
    plan.read(starts, seq_lens, table)
    assert plan._reads(layer) is None
    for _ in range(3):
        plan.update()
        plan.list_pieces()
        reads = plan._reads(layer)
        assert reads is not None
        assert (reads.keys, reads.values) == (keys.data_ptr(), values.data_ptr())
        count = ctypes.c_int64.from_address(reads.num_pieces).value
        pieces = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(reads.pieces))
        decodes = zip(table[[0, 1, 3, 4]], seq_lens[[0, 1, 3, 4]].tolist(), strict=True)
        expected = [visible_pieces(blocks, seq_len, window, block_pieces) for blocks, seq_len in decodes]
        assert pieces.tolist() == [piece for each in expected for piece in each[: MOST_PIECES // 5]]
        seq_lens += 1
        table[:] = rng.permutation(table.ravel()).reshape(table.shape)


def test_long_requests_share_the_room_of_a_list() -> None:
    plan = decode.DecodePlan(Shape(32, 8, 128, 16, 0.1, 0, 0.0, 4), most_reqs=2)
    table = np.arange(2 * 200, dtype=np.int32).reshape(2, 200)
    plan.read(np.array([0, 1, 2], np.int32), np.array([3200, 40], np.int32), table)
    plan.list_pieces()
    assert plan._pieces[: MOST_PIECES // 2].tolist() == list(range(MOST_PIECES // 2))
    first = 200 * 256  # of the second one's blocks
    assert plan._pieces[MOST_PIECES // 2 :][:640].tolist() == list(range(first, first + 640))
    assert plan._record[0]["num_pieces"] == MOST_PIECES // 2 + 640


def test_blocks_that_are_no_whole_pieces_are_left_alone() -> None:
    plan = decode.DecodePlan(Shape(1, 1, 80, 1, 0.1, 0, 0.0, 4), most_reqs=1)
    plan.read(np.array([0, 1], np.int32), np.array([100], np.int32), np.zeros((1, 100), np.int32))
    plan.list_pieces()
    assert plan._record[0]["num_pieces"] == 0


def multiplied_by(kernel: ModuleType, dtype: torch.dtype, *, in_int8: bool = False) -> None:
    if not IS_WIDE or _packed_kernel(PACKINGS["q4_1"], dtype, in_int8) is not kernel:
        pytest.skip("another kernel multiplies on this CPU")


@pytest.mark.parametrize(
    ("kernel", "dtype", "num_rows", "fetches"),
    [
        (byte_dots, torch.float32, 7, False),
        (byte_dots, torch.float32, 8, True),
        (byte_dots, torch.float32, 11, True),
        (dots, torch.bfloat16, 11, False),
        (dots, torch.bfloat16, 12, True),
        (rounded_dots, torch.bfloat16, 23, False),
        (rounded_dots, torch.bfloat16, 24, True),
    ],
)
def test_recorded_products_fetch_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, kernel: ModuleType, dtype: torch.dtype, num_rows: int, fetches: bool
) -> None:
    """And compute what they do without, step after step; each has the pieces of its own step."""
    in_int8, packing = kernel is rounded_dots, PACKINGS["q4_1"]
    multiplied_by(kernel, dtype, in_int8=in_int8)
    case = Case(tuple((1, 60 + 9 * i) for i in range(num_rows)), num_heads=9, num_kv_heads=3, dtype=dtype)
    given = build(case)
    laid = [ops.lay_out_packed(packed(packing, 576, 576), packing, dtype, in_int8=in_int8) for _ in range(2)]
    hidden, result = given.query.flatten(1).clone(), torch.empty(num_rows, 576, dtype=dtype)

    def run() -> None:
        query = ops.linear_packed(hidden, laid[0], packing, in_int8=in_int8)
        attended = ops.paged_attention(
            query.view(num_rows, 9, 64), given.key_cache, given.value_cache, given.metadata, **case.options
        )
        result.copy_(ops.linear_packed(attended.flatten(1), laid[1], packing, in_int8=in_int8))

    programs: list[Any] = []
    made = Program.__init__

    def note(self: Any, calls: Any, lag: int = 0) -> None:
        made(self, calls, lag)
        programs.append(list(calls))

    monkeypatch.setattr(Program, "__init__", note)
    with forced_backend("cpu"):
        graph = capture(run, Pool())
        (calls,) = programs
        products = [each.arguments for each in calls if isinstance(each.prefetch, Fetches)]
        shares = [each[SHARE + OF] for each in products]
        assert shares == ([576 * 576, 0] if fetches else [])
        (plan,) = (each for each in given.metadata.plans.values() if isinstance(each, decode.DecodePlan))
        for shorter in range(3):
            given.metadata.seq_lens_np[:] -= shorter
            given.metadata.plans.clear()
            run()
            expected = result.clone()
            result.zero_()
            graph()
            assert torch.equal(result, expected)
            if fetches:
                seq_lens, block_pieces = given.metadata.seq_lens_np, 16 * 3 * 64 * dtype.itemsize // PIECE
                tables = given.metadata.block_table.numpy()
                listed = [visible_pieces(tables[i], int(seq_lens[i]), 0, block_pieces) for i in range(num_rows)]
                pieces = [piece for each in listed for piece in each]
                assert plan._pieces[: len(pieces)].tolist() == pieces
                assert plan._record[0]["num_pieces"] == len(pieces)


@pytest.mark.parametrize("is_split", [False, True])
def test_what_stands_between_programs_changes_no_share(is_split: bool) -> None:
    """A list made in one is for products in another."""
    packing, num_rows = PACKINGS["q4_1"], 8
    multiplied_by(byte_dots, torch.float32)
    case = Case(((1, 60),) * num_rows, num_heads=9, num_kv_heads=3)
    given = build(case)
    laid = ops.lay_out_packed(packed(packing, 576, 576), packing, torch.float32)
    result = torch.empty(num_rows, 576)

    def attend(hidden: torch.Tensor) -> torch.Tensor:
        caches = given.key_cache, given.value_cache
        return ops.paged_attention(hidden.view(num_rows, 9, 64), *caches, given.metadata, **case.options).flatten(1)

    def run() -> None:
        first = attend(given.query.flatten(1))
        if is_split:
            as_one_action(lambda tensor: tensor.mul_(1.0), first)
        result.copy_(attend(ops.linear_packed(first, laid, packing)))

    listener = Recorder(Pool(), LAG)
    with forced_backend("cpu"), listener, recorded_by(listener):
        run()
    _, actions = listener.finish()
    calls = listener._all_calls
    assert sum(isinstance(action, Program) for action in actions) == (2 if is_split else 1)
    (product,) = (each.arguments for each in calls if isinstance(each.prefetch, Fetches))
    (lister,) = (each.arguments for each in calls if isinstance(each.prefetch, Lists))
    assert product[SHARE + OF] == 576 * 576
    assert lister.num_rows == num_rows


_GOES_ALONG = """
import ctypes, mmap, resource, sys, torch
import numpy as np
from quire.kernels import ops
from quire.kernels.cpu import kv_prefetch, packed_call
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import PACKINGS

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may die
dtype, num_rows, in_int8, count = getattr(torch, sys.argv[1]), *map(int, sys.argv[2:])
forbidden = mmap.mmap(-1, 1 << 16)
address = ctypes.addressof(ctypes.c_char.from_buffer(forbidden))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(1 << 16), 0) == 0
num_pieces = np.array([count])
before = packed_call.run_call

def with_share(call):
    words = (ctypes.c_int64 * kv_prefetch.NUM_WORDS).from_address(call.prefetch.words)
    words[:] = [address, num_pieces.ctypes.data, 0, 0, 0, 1, 1]
    before(call)

packed_call.run_call = with_share
packing = PACKINGS["q4_1"]
weight = torch.zeros(64, packing.row_bytes(64), dtype=torch.uint8)
laid = ops.lay_out_packed(weight, packing, dtype, in_int8=bool(in_int8))
with forced_backend("cpu"):
    ops.linear_packed(torch.zeros(num_rows, 64, dtype=dtype), laid, packing, in_int8=bool(in_int8))
"""


@pytest.mark.parametrize(
    ("kernel", "dtype", "num_rows"),
    [
        (byte_dots, "float32", 8),
        (byte_dots, "float32", 9),
        (dots, "bfloat16", 12),
        (dots, "bfloat16", 40),
        (rounded_dots, "bfloat16", 24),
    ],
)
def test_products_go_along_their_share(kernel: ModuleType, dtype: str, num_rows: int) -> None:
    """Which shows where the list of its pieces must not be read: one that has pieces does so, and is killed."""
    multiplied_by(kernel, getattr(torch, dtype), in_int8=kernel is rounded_dots)
    command = [sys.executable, "-c", _GOES_ALONG, dtype, str(num_rows), str(int(kernel is rounded_dots))]
    without, with_pieces = (subprocess.run([*command, count], capture_output=True, text=True) for count in "01")
    assert without.returncode == 0, without.stderr
    assert with_pieces.returncode in (-signal.SIGSEGV, -signal.SIGBUS), with_pieces.stderr
