# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, var-annotated"
# (compiled functions and their views into memory are not Python to a type checker)
"""Attention of requests with one query token, compiled with Numba: it reads the blocks where they are.

The context of a request is cut into chunks at fixed positions, so that one long request keeps all threads busy:

    positions   0 .. 255      256 .. 511    512 .. seq_len - 1
    items       (r, 0)        (r, 1)        (r, 2)                each: sum of weights, highest score, weighted values

Whoever finishes an item and sees that all of its request are finished merges them, in order; two may, to the same
bits. The result depends on neither the number of threads nor the rest of the batch, and has the same bits as that of
`prompts`, but where prompts are left to `prompt_tiles`: there pairs of numbers, or tiles, are multiplied here, too.

Why not torch: it has no paged attention, so keys and values are gathered into dense copies first, request by request.
The price: importing Numba takes 0.4 s, and the first call on a machine compiles for some seconds (kept on disk
afterwards).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from .. import fp8
from . import decode_tiles, matrix_tiles
from .attention_call import LAYER, NUMBERS, Layer, Shape, layer_call, new_plan, plan_type
from .call import Arguments, RowFunction, enter_rows, take_rows
from .claims import RUN, enter, take_item
from .decode_tiles import MORE_HEADS
from .heads import AHEAD, CHUNK, POSITIONS, VALUES, divide, merge, score_group, to_weights, weigh_group
from .intrinsics import exchange, load_acquire, load_in_order, pointer, widened
from .kv_prefetch import MOST_PIECES, PIECE, Lists, Reads, new_pieces
from .sources import digest_of, filed_as
from .threads import run_call
from .tile_product import TILE
from .vectors import LANES

DTYPES = (torch.float32, torch.bfloat16)  # of queries
# In float32; in bfloat16, where results need not have the bits of those of `prompts`, scored by dot products, or all of
# it in matrix tiles (`decode_tiles`).
Way = Literal["vectors", "pairs", "tiles"]

_PLAN = plan_type(
    # What a step has, in memory that stays where it is
    *("starts", "seq_lens", "block_table", "table_stride", "num_reqs"),
    # What follows from it: the rows of the decodes in the query and in the block table; by item, whose it is and of
    # which positions; by decode, its first item
    *("tokens", "requests", "owners", "begins", "ends", "first_item", "num_decodes", "num_items"),
    # For calls in turn, so that one may begin while a thread still computes an item of one before: what the items gave,
    # and the last call of whom each was finished
    *("partial", "finished", "room"),
    # What it reads of the caches of a layer (`kv_prefetch`); by decode, its first piece; and how many a block has
    *("pieces", "first_piece", "num_pieces", "block_pieces"),
)
_LISTING = Arguments("plan")
_LISTING_TYPE = _LISTING.dtype
_LISTING_NS = 500.0  # about what the pieces of a decode take, of some hundred tokens
_NUM_TURNS = 4
_MANY_CALLS = 1 << 32  # of one plan


def fits(query: Tensor, cache: Tensor) -> bool:
    """Whether a cache [num_blocks, block_size, num_kv_heads, head_dim] can be read so: others are gathered."""
    is_known = query.dtype in DTYPES and cache.dtype in (query.dtype, fp8.DTYPE)
    return is_known and cache.shape[-1] % LANES == 0


def way_beside_tiles(sliding_window: int | None) -> Way:
    """Beside prompts that `prompt_tiles` reads, in bfloat16."""
    return "tiles" if decode_tiles.fits(sliding_window) else "pairs"


class DecodePlan:
    """What the decodes of a step, the requests with one query token, have in common in all layers.

    In a record that stays where it is: another step may be planned in it, and, where it stands in the same memory, with
    `update` alone.
    """

    def __init__(self, shape: Shape, most_reqs: int) -> None:
        self._shape, self._record = shape, new_plan(_PLAN, shape)
        self._of_decodes, self._first_item = np.empty((2, most_reqs), np.int64), np.empty(most_reqs + 1, np.int64)
        self._capacity = 0  # items for which there is memory
        fields = self._record[0]
        fields["tokens"], fields["requests"] = self._of_decodes.ctypes.data, self._of_decodes[1:].ctypes.data
        fields["first_item"] = self._first_item.ctypes.data
        block_bytes = shape.block_size * shape.num_kv_heads * shape.head_dim * shape.cache_bytes
        self._pieces, self._first_piece = np.empty(0, np.int32), np.empty(most_reqs + 1, np.int64)
        fields["first_piece"] = self._first_piece.ctypes.data
        fields["block_pieces"] = block_bytes // PIECE if block_bytes % PIECE == 0 else 0
        self._address, self._num_calls = self._record.ctypes.data, 0

    def read(
        self, starts: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], block_table: npt.NDArray[np.int32]
    ) -> None:
        """Plan for a step. `starts` [num_reqs + 1] are where the query tokens of a request begin, and end; `seq_lens`
        [num_reqs]; `block_table` [num_reqs, max_blocks]."""
        for name, given in (("starts", starts), ("seq_lens", seq_lens), ("block_table", block_table)):
            if given.dtype != np.int32 or given.strides[-1] != 4:
                raise TypeError(f"{name} must be int32, one behind the other, got {given.dtype} {given.strides}")
        if len(seq_lens) > self._of_decodes.shape[1]:
            raise ValueError(f"a plan for up to {self._of_decodes.shape[1]} requests was given {len(seq_lens)}")
        self._inputs = starts, seq_lens, block_table  # kept: the record has their addresses
        fields = self._record[0]
        fields["starts"], fields["seq_lens"] = starts.ctypes.data, seq_lens.ctypes.data
        fields["block_table"] = block_table.ctypes.data
        fields["table_stride"], fields["num_reqs"] = block_table.strides[0] // block_table.itemsize, len(seq_lens)
        self.update()

    @property
    def num_decodes(self) -> int:
        return int(self._record[0]["num_decodes"])

    def update(self) -> None:
        """Plan for what a step has now."""
        num_items = _plan(self._address)
        if num_items > self._capacity:
            self._make_room(num_items + num_items // 2)
            _plan(self._address)

    def _make_room(self, num_items: int) -> None:
        self._capacity = num_items
        by_item = np.empty((3, num_items), np.int64)
        partial = np.empty(_NUM_TURNS * num_items * self._shape.num_heads * (self._shape.head_dim + 2), np.float32)
        finished = np.zeros(_NUM_TURNS * num_items, np.int64)
        self._items = by_item, partial, finished  # likewise
        fields = self._record[0]
        for name, values in zip(("owners", "begins", "ends"), by_item, strict=True):
            fields[name] = values.ctypes.data
        fields["partial"], fields["finished"], fields["room"] = partial.ctypes.data, finished.ctypes.data, num_items

    def list_pieces(self) -> None:
        """To be recorded: write down what layers read, so that it can be fetched."""
        if not len(self._pieces):
            self._pieces = new_pieces()
            self._record[0]["pieces"] = self._pieces.ctypes.data
        call = _list_pieces.call(self._of_decodes.shape[1], 1, self._address)
        run_call(call._replace(prefetch=Lists(self._pieces.ctypes.data)))

    def _reads(self, layer: Layer) -> Reads | None:
        """None where nothing is listed."""
        if not len(self._pieces):
            return None
        num_pieces, caches = self._record["num_pieces"].ctypes.data, (layer.key_cache, layer.value_cache)
        return Reads(self._pieces.ctypes.data, num_pieces, *(each.data_ptr() for each in caches))

    def attend(self, layer: Layer, way: Way = "vectors") -> None:
        """Attend in one layer, whose caches `fits`. Writes the rows of its `out`, contiguous, that were planned."""
        self._num_calls += 1
        turn = self._num_calls % _NUM_TURNS
        compiled = worker(layer.query.dtype, layer.key_cache.dtype, way)
        call = layer_call(compiled, layer, self._record, number=self._num_calls, scratch=turn)
        run_call(call._replace(scratch=self._address + turn, prefetch=self._reads(layer)))


def _planner(sources: str) -> Any:
    @cfunc(types.int64(types.int64), cache=True, error_model="numpy")
    def planner(address: int) -> int:
        """Returns how many items there are; those for which there is no room are not written."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        plan = carray(pointer(address), (1,), _PLAN)[0]
        num_reqs, many = plan.num_reqs, np.int64(1) << 31
        starts = carray(pointer(plan.starts), (num_reqs + 1,), np.int32)
        seq_lens = carray(pointer(plan.seq_lens), (num_reqs,), np.int32)
        tokens = carray(pointer(plan.tokens), (num_reqs,), np.int64)
        requests = carray(pointer(plan.requests), (num_reqs,), np.int64)
        first_item = carray(pointer(plan.first_item), (num_reqs + 1,), np.int64)
        owners = carray(pointer(plan.owners), (many,), np.int64)
        begins = carray(pointer(plan.begins), (many,), np.int64)
        ends = carray(pointer(plan.ends), (many,), np.int64)
        first_piece, most_pieces = carray(pointer(plan.first_piece), (num_reqs + 1,), np.int64), MOST_PIECES // num_reqs
        decode, item, piece = 0, 0, 0
        for request in range(num_reqs):
            if starts[request + 1] - starts[request] != 1:
                continue
            end = np.int64(seq_lens[request])
            begin = max(np.int64(0), end - plan.window) if plan.window != 0 else np.int64(0)
            tokens[decode], requests[decode], first_item[decode] = starts[request], request, item
            first_piece[decode] = piece
            piece += min(_num_pieces(plan, begin, end), most_pieces)
            while begin < end:
                following = min((begin // CHUNK + 1) * CHUNK, end)
                if item < plan.room:
                    owners[item], begins[item], ends[item] = decode, begin, following
                begin = following
                item += 1
            decode += 1
        first_item[decode], first_piece[decode] = item, piece
        plan.num_decodes, plan.num_items, plan.num_pieces = decode, item, piece
        return item

    return planner


@njit(error_model="numpy")
def _num_pieces(plan: Any, begin: int, end: int) -> int:
    """How many there are from the beginning of the block of position `begin` on to position `end`."""
    num_tokens = end - begin // plan.block_size * plan.block_size
    count: int = (num_tokens * plan.block_pieces + plan.block_size - 1) // plan.block_size
    return count


def _lister(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """Decode by decode."""
        sources  # noqa: B018 (likewise)
        plan = carray(pointer(carray(pointer(address), (1,), _LISTING_TYPE)[0].plan), (1,), _PLAN)[0]
        many, block_pieces = np.int64(1) << 31, plan.block_pieces
        seq_lens = carray(pointer(plan.seq_lens), (plan.num_reqs,), np.int32)
        requests = carray(pointer(plan.requests), (plan.num_decodes,), np.int64)
        table = carray(pointer(plan.block_table), (many,), np.int32)
        first_piece = carray(pointer(plan.first_piece), (plan.num_decodes + 1,), np.int64)
        pieces = carray(pointer(plan.pieces), (plan.num_pieces,), np.int32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, start, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for decode in range(start, min(stop, plan.num_decodes)):
                request, piece, end = requests[decode], first_piece[decode], first_piece[decode + 1]
                begin = max(0, seq_lens[request] - plan.window) if plan.window != 0 else 0
                block = request * plan.table_stride + begin // plan.block_size
                while piece < end:
                    first = table[block] * block_pieces
                    for i in range(min(block_pieces, end - piece)):
                        pieces[piece + i] = first + i
                    piece, block = piece + block_pieces, block + 1

    return worker


@njit(error_model="numpy")
def _merge_items(partial: Any, first: int, last: int, sinks: Any, has_sinks: bool, value_scale: Any, out: Any) -> None:
    """Merge the items first .. last - 1 of a request, [items, heads, head_dim + 2], into out [heads, head_dim].

    A sink [heads] is one more item before them, with a weight of 1 and no value.
    """
    num_heads, head_dim = out.shape
    merged = np.empty(head_dim, np.float32)
    for head in range(num_heads):
        total, top = np.float32(0.0), np.float32(-np.inf)
        if has_sinks:
            total, top = np.float32(1.0), sinks[head]
        merged[:] = np.float32(0.0)
        for item in range(first, last):
            found = partial[item, head]
            total, top = merge(total, top, merged, found[head_dim], found[head_dim + 1], found[:head_dim])
        divide(merged, total, value_scale, out[head])


@njit(error_model="numpy")
def _is_last(finished: int, item: int, first: int, last: int, call: int) -> bool:
    """Write down that `item` is finished in this call; whether all of its request's are, first .. last - 1."""
    exchange(finished + 8 * item, call)
    num_finished = 0
    for other in range(first, last):
        num_finished += load_in_order(finished + 8 * other) == call
    return num_finished == last - first


@njit(error_model="numpy")
def _place_tokens(
    plan: Any, decode: int, begin: int, count: int, token_bytes: int, start: int, offsets: Any, first: int
) -> None:
    """Where `count` tokens of a decode from position `begin` on lie, in bytes behind `start`, in a cache: offsets from
    number `first` on."""
    block_size, end = plan.block_size, begin + count
    request = carray(pointer(plan.requests), (plan.num_decodes,), np.int64)[decode]
    table = carray(pointer(plan.block_table + 4 * request * plan.table_stride), (np.int64(1) << 31,), np.int32)
    while begin < end:
        block, within = begin // block_size, begin % block_size
        place = start + (table[block] * block_size + within) * token_bytes
        num_tokens = min(block_size - within, end - begin)
        for i in range(num_tokens):
            offsets[first + i] = place + i * token_bytes
        begin, first = begin + num_tokens, first + num_tokens


@njit(error_model="numpy")
def _give(acc: Any, totals: Any, tops: Any, is_all: bool, value_scale: Any, partial: Any, out: Any) -> None:
    """What an item has found: the result, `out` [heads, head_dim], if it is all of its request's context; otherwise
    what `_merge_items` takes, `partial` [heads, head_dim + 2]."""
    num_heads, head_dim = acc.shape
    for head in range(num_heads):
        if is_all:
            for d in range(head_dim):
                acc[head, d] += np.float32(0.0)  # as `merge` has it: none is -0
            divide(acc[head], totals[head], value_scale, out[head])
        else:
            partial[head, :head_dim] = acc[head]
            partial[head, head_dim], partial[head, head_dim + 1] = totals[head], tops[head]


@njit(error_model="numpy")
def _new_query(plan: Any) -> Any:
    """Memory of a thread for what a token asks."""
    return np.empty(plan.num_heads * plan.head_dim, np.float32)


@njit(error_model="numpy")
def _score(
    layer: Any,
    plan: Any,
    token: int,
    query: Any,
    like: Any,
    in_pairs: bool,
    memory: int,
    offsets: Any,
    count: int,
    scores: Any,
) -> None:
    """scores [heads, CHUNK] = those of the keys at `count` offsets, a multiple of POSITIONS. `query` is flat."""
    group, head_dim = plan.num_heads // plan.num_kv_heads, plan.head_dim
    scale, head_bytes = np.float32(plan.scale * layer.key_scale), head_dim * like.itemsize
    q_start, q_row = memory, head_dim * 4
    if in_pairs:
        q_start, q_row = layer.query + token * layer.token_stride * 2, layer.head_stride * 2
    else:
        q = carray(pointer(memory), (plan.num_heads, head_dim), np.float32)
        for head in range(plan.num_heads):
            base = token * layer.token_stride + head * layer.head_stride
            for d in range(head_dim):
                q[head, d] = widened(query[base + d]) * scale
    scores_start, offsets_start = scores.ctypes.data, offsets.ctypes.data
    for i in range(0, count, POSITIONS):
        for kv_head in range(plan.num_kv_heads):
            head = kv_head * group
            score_group(
                like, group, q_start + head * q_row, q_row, layer.key_cache + kv_head * head_bytes,
                offsets_start + i * 8, head_dim, scale, scores_start + (head * CHUNK + i) * 4, CHUNK * 4,
            )  # fmt: skip


@njit(error_model="numpy")
def _weigh(layer: Any, plan: Any, like: Any, _memory: Any, weights: Any, offsets: Any, length: int, acc: Any) -> None:
    """acc [heads, head_dim] = the sums of weight x value over `length` positions; weights [heads, CHUNK]. Behind the
    offsets are AHEAD of what is fetched next."""
    group, head_dim = plan.num_heads // plan.num_kv_heads, plan.head_dim
    head_bytes, weights_start, acc_start = head_dim * like.itemsize, weights.ctypes.data, acc.ctypes.data
    acc[:] = np.float32(0.0)
    for i in range(0, length, VALUES):
        for kv_head in range(plan.num_kv_heads):
            head = kv_head * group
            weigh_group(
                like, AHEAD, 1, 1, group, head_dim, weights_start + (head * CHUNK + i) * 4, CHUNK * 4,
                layer.value_cache + kv_head * head_bytes, offsets.ctypes.data + i * 8, min(VALUES, length - i),
                acc_start + head * head_dim * 4, head_dim * 4,
            )  # fmt: skip


def _attend_by(name: str, new_memory: Any, score: Any, weigh: Any, at_once: int) -> Any:
    """What attends by functions such as those above, of which one scores so many positions at once.

    By a name of its own: machine code that one process compiled and another one loads is called by names, and of two
    that have the same, both would run the one that came first.
    """

    @njit(error_model="numpy")
    @filed_as(name)
    def attend(layer: Any, plan: Any, query: Any, out: Any, like: Any, in_pairs: bool) -> None:
        """One thread: take items until there are none. `query` is flat; caches have the type of `like`, see `heads`,
        which is signed if `in_pairs`."""
        num_heads, head_dim, num_items = plan.num_heads, plan.head_dim, plan.num_items
        token_bytes = plan.num_kv_heads * head_dim * like.itemsize
        tokens = carray(pointer(plan.tokens), (plan.num_decodes,), np.int64)
        owners = carray(pointer(plan.owners), (num_items,), np.int64)
        begins = carray(pointer(plan.begins), (num_items,), np.int64)
        ends = carray(pointer(plan.ends), (num_items,), np.int64)
        first_item = carray(pointer(plan.first_item), (plan.num_decodes + 1,), np.int64)
        first_place = layer.scratch * plan.room
        partial_place = plan.partial + first_place * num_heads * (head_dim + 2) * 4
        partial = carray(pointer(partial_place), (num_items, num_heads, head_dim + 2), np.float32)
        finished = plan.finished + 8 * first_place
        call = load_acquire(layer.claims) // RUN * _MANY_CALLS + layer.number
        sinks = carray(pointer(layer.sinks), (num_heads,), np.float32)
        softcap, value_scale = np.float32(plan.softcap), np.float32(layer.value_scale)

        own = new_memory(plan)
        numbers = np.empty(num_heads * (head_dim + 2) + (num_heads + MORE_HEADS) * CHUNK, np.float32)
        places = np.empty(CHUNK + AHEAD, np.int64)
        # Views without a count of who uses them: to count takes as long as some of what is done here.
        start, memory = np.int64(numbers.ctypes.data), np.int64(own.ctypes.data)
        scores = carray(pointer(start), (num_heads + MORE_HEADS, CHUNK), np.float32)
        start += (num_heads + MORE_HEADS) * CHUNK * 4
        acc = carray(pointer(start), (num_heads, head_dim), np.float32)  # not yet divided by the sum of weights
        start += num_heads * head_dim * 4
        totals = carray(pointer(start), (num_heads,), np.float32)
        tops = carray(pointer(start + num_heads * 4), (num_heads,), np.float32)
        offsets = carray(pointer(np.int64(places.ctypes.data)), (CHUNK + AHEAD,), np.int64)  # in the caches, in bytes
        thread, item, lap = enter(layer.claims), -1, 0
        while True:
            item, lap = take_item(layer.claims, layer.num_threads, num_items, thread, item, lap)
            if item < 0:
                break
            owner = owners[item]
            begin, length = begins[item], ends[item] - begins[item]
            _place_tokens(plan, owner, begin, length, token_bytes, 0, offsets, 0)
            whole = (length + at_once - 1) // at_once * at_once
            for i in range(length, whole):  # scored for nothing
                offsets[i] = offsets[length - 1]
            for i in range(AHEAD):  # behind the last keys come values
                offsets[whole + i] = layer.value_cache - layer.key_cache + offsets[min(i, length - 1)]
            score(layer, plan, tokens[owner], query, like, in_pairs, memory, offsets, whole, scores)
            for head in range(num_heads):
                totals[head], tops[head] = to_weights(scores.ctypes.data + head * CHUNK * 4, length, softcap)
            # And behind the last values keys of the next item.
            follower, keys_behind = min(item + 1, num_items - 1), layer.key_cache - layer.value_cache
            count = min(ends[follower] - begins[follower], AHEAD)
            _place_tokens(plan, owners[follower], begins[follower], count, token_bytes, keys_behind, offsets, length)
            for i in range(count, AHEAD):
                offsets[length + i] = offsets[length]
            weigh(layer, plan, like, memory, scores, offsets, length, acc)
            first, last = first_item[owner], first_item[owner + 1]
            is_all, result = last - first == 1 and layer.sinks == 0, out[tokens[owner]]
            _give(acc, totals, tops, is_all, value_scale, partial[item], result)
            if not is_all and _is_last(finished, item, first, last, call):
                _merge_items(partial, first, last, sinks, layer.sinks != 0, value_scale, result)
        own[0] = numbers[0] = places[0] = 0  # they live until here: Numba does not see who has their addresses

    return attend


_attend = _attend_by("vectors", _new_query, _score, _weigh, POSITIONS)
_attend_in_tiles = _attend_by("tiles", decode_tiles.new_memory, decode_tiles.score, decode_tiles.weigh, TILE)


def _worker(query_type: type[np.generic], cache_type: type[np.generic], in_pairs: bool, sources: str) -> Any:
    keys_type = {np.uint16: np.int16, np.uint8: np.int8}[cache_type] if in_pairs else cache_type

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(query_type.__name__, keys_type.__name__)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        layer = carray(pointer(address), (1,), LAYER)[0]
        plan = carray(pointer(layer.plan), (1,), _PLAN)[0]
        many = np.int64(1) << 31
        query = carray(pointer(layer.query), (many,), query_type)
        out = carray(pointer(layer.out), (many, plan.num_heads, plan.head_dim), query_type)
        _attend(layer, plan, query, out, np.empty(0, keys_type), in_pairs)

    return worker


def _worker_in_tiles(cache_type: type[np.generic], sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(cache_type.__name__)
    def worker(address: int) -> None:
        sources  # noqa: B018 (likewise)
        layer = carray(pointer(address), (1,), LAYER)[0]
        plan = carray(pointer(layer.plan), (1,), _PLAN)[0]
        many = np.int64(1) << 31
        query = carray(pointer(layer.query), (many,), np.uint16)
        out = carray(pointer(layer.out), (many, plan.num_heads, plan.head_dim), np.uint16)
        _attend_in_tiles(layer, plan, query, out, np.empty(0, cache_type), False)
        matrix_tiles.end()

    return worker


_SOURCES = digest_of(
    *(
        "attention_call",
        "call",
        "claims",
        "decode",
        "decode_tiles",
        "exponential",
        "walk",
        "features",
        "heads",
        "intrinsics",
        "kv_prefetch",
        "matrix_tiles",
        "tile_product",
        "vectors",
    )
)
# The interpreter's lock is kept: it takes less than to let others run.
_plan = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_planner(_SOURCES).address)
_list_pieces = RowFunction(lambda: _lister(_SOURCES), _LISTING, _LISTING_NS, is_idempotent=True)
FUNCTIONS = (_list_pieces,)


@cache
def worker(query: torch.dtype, keys: torch.dtype, way: Way = "vectors") -> Any:
    """For a query and a cache of these types: compiled when it is first asked for."""
    if way == "tiles":
        return _worker_in_tiles(NUMBERS[keys], _SOURCES)
    return _worker(NUMBERS[query], NUMBERS[keys], way == "pairs", _SOURCES)
