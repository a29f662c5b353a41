"""What attention reads is fetched by the products before it: all of it, once, by the thread that attends it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Case, build
from numba import njit, types
from numba.extending import intrinsic
from test_packed import packed

from quire.kernels import ops
from quire.kernels.cpu import byte_dots, decode, dots, kv_prefetch
from quire.kernels.cpu.attention_call import Layer, Shape
from quire.kernels.cpu.features import IS_WIDE
from quire.kernels.cpu.graph import Pool, capture
from quire.kernels.cpu.kv_prefetch import MOST_PIECES, NUM_WORDS, OF, PIECE, PIECES, point_to_share, share_out
from quire.kernels.cpu.linear import _packed_kernel
from quire.kernels.cpu.packed_call import NUM_ARGUMENTS, SHARE
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recording import CacheReads, CompiledCall
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import PACKINGS


class Product:
    """As a record sees it. It fetches nothing if it has no weights."""

    def __init__(self, num_weights: int = 0) -> None:
        self.words = (ctypes.c_int64 * NUM_WORDS)()
        place = ctypes.addressof(self.words) if num_weights else 0
        self.call = CompiledCall(None, None, None, fetches=place, num_weights=num_weights)

    def pieces_of(self, item: int, num_items: int, num_threads: int) -> range:
        cursor = np.zeros(4, np.int64)
        point_to_share(cursor, ctypes.addressof(self.words), num_threads, item, num_items)
        return range(*((cursor[:2] - self.words[PIECES]) // 4).tolist())


def attention(num_pieces: np.ndarray, keys: int = 3 << 40) -> CompiledCall:
    reads = CacheReads(pieces=5 << 40, num_pieces=num_pieces.ctypes.data, keys=keys, values=4 << 40)
    return CompiledCall(None, None, None, reads=reads)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
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


def expected_pieces(block_table: np.ndarray, seq_lens: list[int], window: int, block_pieces: int, most: int) -> list:
    found = []
    for blocks, seq_len in zip(block_table, seq_lens, strict=True):
        begin = max(0, seq_len - window) // 16 if window else 0
        pieces = [blocks[i // block_pieces] * block_pieces + i % block_pieces for i in range(64 * block_pieces)]
        end = -(-seq_len * block_pieces // 16)
        found += pieces[begin * block_pieces : end][:most]
    return found


@pytest.mark.parametrize(("window", "cache_bytes"), [(0, 4), (0, 2), (0, 1), (100, 4), (17, 2)])
def test_a_plan_lists_what_layers_read(window: int, cache_bytes: int) -> None:
    """Of requests with one token, of another step with the same plan, too; blocks have 48, 24 or 12 pieces."""
    rng, block_pieces = np.random.default_rng(1), 16 * 3 * 64 * cache_bytes // PIECE
    plan = decode.DecodePlan(Shape(9, 3, 64, 16, 0.1, window, 0.0, cache_bytes), most_reqs=5)
    table = rng.permutation(5 * 64).reshape(5, 64).astype(np.int32)
    starts, seq_lens = np.array([0, 1, 2, 7, 8, 9], np.int32), np.array([1, 16, 50, 130, 1000], np.int32)
    cache = torch.empty(1)
    layer = Layer(cache, cache, cache, cache, None, 1.0, 1.0)
    plan.read(starts, seq_lens, table)
    assert plan._reads(layer) is None
    for grown in (0, 1, 20):
        plan.read(starts, seq_lens + np.int32(grown), table)
        plan.list_pieces()
        reads = plan._reads(layer)
        assert reads is not None
        assert reads.keys == reads.values == cache.data_ptr()
        count = ctypes.c_int64.from_address(reads.num_pieces).value
        pieces = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(reads.pieces))
        decodes = [0, 1, 3, 4]
        lens = (seq_lens[decodes] + grown).tolist()
        assert pieces.tolist() == expected_pieces(table[decodes], lens, window, block_pieces, MOST_PIECES // 5)


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


@pytest.mark.skipif(not IS_WIDE, reason="products do not fetch on this CPU")
@pytest.mark.parametrize(
    ("dtype", "num_rows", "fetches"),
    [
        (torch.float32, 7, False),
        (torch.float32, 8, True),
        (torch.float32, 11, True),
        (torch.bfloat16, 11, False),
        (torch.bfloat16, 12, True),
    ],
)
def test_recorded_products_fetch_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int, fetches: bool
) -> None:
    """And compute what they do without."""
    packing = PACKINGS["q4_1"]
    if _packed_kernel(dtype, in_int8=False) not in (byte_dots, dots):
        pytest.skip("another kernel multiplies here")
    case = Case(tuple((1, 60 + 30 * i) for i in range(num_rows)), num_heads=9, num_kv_heads=3, dtype=dtype)
    given = build(case)
    laid = [ops.lay_out_packed(packed(packing, 576, 576), packing, dtype) for _ in range(2)]
    hidden, result = given.query.flatten(1).clone(), torch.empty(num_rows, 576, dtype=dtype)

    def run() -> None:
        query = ops.linear_packed(hidden, laid[0], packing)
        attended = ops.paged_attention(
            query.view(num_rows, 9, 64), given.key_cache, given.value_cache, given.metadata, **case.options
        )
        result.copy_(ops.linear_packed(attended.flatten(1), laid[1], packing))

    programs: list[Any] = []
    made = Program.__init__

    def note(self: Any, calls: Any, lag: int = 0) -> None:
        made(self, calls, lag)
        programs.append(list(calls))

    monkeypatch.setattr(Program, "__init__", note)
    with forced_backend("cpu"):
        graph = capture(run, Pool())
        expected = result.clone()
        for _ in range(3):
            result.zero_()
            graph()
            assert torch.equal(result, expected)
    (calls,) = programs
    products = [each.arguments for each in calls if getattr(each.arguments, "_length_", 0) == NUM_ARGUMENTS]
    assert len(products) == 2
    assert [each[SHARE + OF] for each in products] == [576 * 576 if fetches else 0, 0]
