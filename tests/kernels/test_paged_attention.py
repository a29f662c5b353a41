"""The CPU operations against the float32 reference, and what they promise beyond the numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import CASES, KEY_SCALE, MIXED, VALUE_SCALE, Case, alone, attend, build
from torch import Tensor

from quire.kernels import ops
from quire.kernels.cpu import decode, matrix_tiles, prompt_tiles
from quire.kernels.dispatch import forced_backend

needs_tiles = pytest.mark.skipif(prompt_tiles.PRODUCT is None, reason="this CPU does not multiply bfloat16")


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` gives NaN: an output element that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def bits(*tensors: Tensor) -> list[Tensor]:
    """Copies that compare equal where NaN stands in both."""
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference_and_reads_nothing_else(case: Case) -> None:
    inputs = build(case)
    tensors = (inputs.query, inputs.key_cache, inputs.value_cache, inputs.metadata.block_table)
    before = bits(*tensors)
    out = attend(inputs, case)
    with forced_backend("reference"):
        expected = attend(inputs.to_float32(), case)
    assert not expected.isnan().any()
    torch.testing.assert_close(out.float(), expected, atol=case.tolerance, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(bits(*tensors), before, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 700), *MIXED, (40, 300)), num_heads=9, num_kv_heads=3),
        Case(((1, 700), *MIXED), sliding_window=9),
        Case(MIXED, softcap=5.0),
        Case(MIXED, dtype=torch.bfloat16, head_dim=80),
        Case(((1, 700), *MIXED), sinks=True),
        Case(((1, 700), *MIXED), fp8=True),
    ],
    ids=lambda case: case.name,
)
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(case: Case) -> None:
    inputs = build(case)
    together = attend(inputs, case)
    starts = inputs.metadata.query_start_loc_np
    for request in range(len(case.lens)):
        assert torch.equal(attend(alone(inputs, request), case), together[starts[request] : starts[request + 1]])


# By request, whose first blocks it has, and how many tokens of them: groups that come in turn, a prefix that ends
# within a chunk, one of no whole chunk.
PREFIXES = [(0, 0), (1, 0), (0, 512), (1, 300), (0, 530), (0, 512), (0, 512), (0, 540), (1, 100), (9, 0), (0, 512)]
SHARED_LENS = tuple((1, 560 + 7 * request) for request in range(len(PREFIXES)))


@pytest.mark.parametrize(
    "case",
    [
        Case(SHARED_LENS, num_heads=9, num_kv_heads=3),
        Case((*SHARED_LENS, (5, 300)), num_heads=8, num_kv_heads=1, dtype=torch.bfloat16, head_dim=80),
        Case(SHARED_LENS, num_heads=2, num_kv_heads=2, sliding_window=700, block_size=4),
        Case(tuple((1, 620) for _ in PREFIXES), sliding_window=500),
        Case(SHARED_LENS, num_heads=6, num_kv_heads=3, sliding_window=580, block_size=48),
        Case(SHARED_LENS, num_heads=5, num_kv_heads=1, head_dim=16, block_size=5),
        Case(SHARED_LENS, softcap=5.0, sinks=True, block_size=32, padding=2),
        Case(SHARED_LENS, num_heads=9, num_kv_heads=3, fp8=True),
    ],
    ids=lambda case: case.name,
)
def test_requests_that_share_blocks(case: Case) -> None:
    """Each gets the bits that it gets alone."""
    inputs = build(case)
    for request, (other, length) in enumerate(PREFIXES):
        first = max(0, case.lens[request][1] - (case.sliding_window or sys.maxsize)) // case.block_size
        shared = slice(first, length // case.block_size)
        inputs.metadata.block_table[request, shared] = inputs.metadata.block_table[other, shared]
    together = attend(inputs, case)
    with forced_backend("reference"):
        expected = attend(inputs.to_float32(), case)
    torch.testing.assert_close(together.float(), expected, atol=case.tolerance, rtol=0)
    for request in range(len(PREFIXES)):
        assert torch.equal(attend(alone(inputs, request), case), together[request : request + 1])


BF16 = torch.bfloat16
PROMPTS = [  # on both sides of chunks of keys, items, and tiles
    Case(((513, 513), (2, 257), (64, 256), (3, 3)), num_heads=9, num_kv_heads=3),
    Case(((300, 700), (1, 300)), num_heads=8, num_kv_heads=1, head_dim=128),
    Case(((200, 600), (260, 260)), num_heads=3, num_kv_heads=3, head_dim=16, block_size=256),
    Case(((40, 2060), (17, 2048)), num_heads=2, num_kv_heads=1, head_dim=48),
    Case(((150, 600), (600, 600), (5, 20)), sliding_window=100),
    Case(((150, 900), (3, 258)), sliding_window=300, num_heads=9, num_kv_heads=3),
    Case(((256, 256), (30, 257), (2, 90)), num_heads=9, num_kv_heads=3, dtype=BF16),
    Case(((100, 200),), sliding_window=33, dtype=BF16, head_dim=80),
    Case(((513, 513), (2, 257), (64, 256), (3, 3), (1, 40)), num_heads=9, num_kv_heads=3, dtype=BF16),
    Case(((300, 700), (33, 300)), num_heads=8, num_kv_heads=1, head_dim=128, block_size=64, dtype=BF16),
    Case(((40, 2060), (17, 2048)), num_heads=2, num_kv_heads=2, head_dim=32, block_size=256, dtype=BF16),
    Case(((150, 900), (3, 258), (600, 600)), sliding_window=300, num_heads=9, num_kv_heads=3, dtype=BF16),
    Case(((150, 600), (5, 20)), sliding_window=9, num_heads=32, num_kv_heads=1, dtype=BF16),
    Case(((70, 90),), block_size=8, dtype=BF16),
    Case(((256, 256), (30, 257), (2, 90)), num_heads=9, num_kv_heads=3, dtype=BF16, fp8=True),
    Case(((150, 900), (3, 258)), sliding_window=300, num_heads=9, num_kv_heads=3, dtype=BF16, fp8=True),
    Case(((513, 513), (2, 257), (3, 3)), num_heads=9, num_kv_heads=3, fp8=True),
]


# Decodes, where the last tile of keys, group of values, or chunk has one token, or all but one, or all.
LENGTHS = tuple((1, length) for length in (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 290, 700))


@pytest.mark.parametrize(
    "case",
    [
        Case(LENGTHS, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=BF16, **others)
        for num_heads, num_kv_heads, others in [
            (9, 3, {}),  # heads of one KV head in a tile of four, in two, in one of sixteen, in more
            (4, 4, {"head_dim": 32, "block_size": 32}),
            (10, 2, {"head_dim": 96, "block_size": 48}),
            (16, 1, {"head_dim": 256}),
            (34, 2, {"head_dim": 128}),
            (9, 3, {"sliding_window": 100}),
            (9, 3, {"fp8": True}),
            (34, 2, {"fp8": True, "head_dim": 96, "block_size": 64}),
        ]
    ],
    ids=lambda case: case.name,
)
def test_decodes_in_bfloat16(case: Case) -> None:
    """Weights and results are rounded to bfloat16, each by 2^-9 at most; and of a weight, what the sum is off by."""
    test_matches_reference_and_reads_nothing_else(case)
    test_a_request_gets_the_same_bits_alone_and_in_a_batch(case)
    inputs = build(case)
    wide = inputs.to_float32()
    with forced_backend("reference"):
        expected = attend(wide, case)
        size = attend(replace(wide, value_cache=wide.value_cache.abs()), case)
    assert ((attend(inputs, case).float() - expected).abs() <= 2**-7 * size).all()


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"dtype": BF16}, "tiles"),
        ({"dtype": BF16, "fp8": True}, "tiles"),
        ({"dtype": BF16, "sliding_window": 100}, "pairs"),
        ({"dtype": BF16, "softcap": 5.0}, "vectors"),
        ({"dtype": BF16, "sinks": True}, "vectors"),
        ({"dtype": BF16, "block_size": 8}, "vectors"),
        ({"dtype": BF16, "head_dim": 80}, "vectors"),
        ({}, "vectors"),
    ],
)
def test_what_computes_decodes(given: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, worker = [], decode.worker

    def written_down(*which: Any) -> Any:
        found.append(which[-1])
        return worker(*which)

    monkeypatch.setattr(decode, "worker", written_down)
    case = Case(((1, 40),), **given)
    attend(build(case), case)
    if way == "tiles" and not matrix_tiles.are_available():
        way = "pairs"
    assert found == [way if prompt_tiles.IS_FAST else "vectors"]


@pytest.fixture(params=[pytest.param("tiles", marks=needs_tiles), "vectors"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What attends to prompts in bfloat16, where there is a choice."""
    monkeypatch.setattr(prompt_tiles, "IS_FAST", request.param == "tiles")
    return request.param


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("case", [case for case in PROMPTS if case.dtype == BF16], ids=lambda case: case.name)
def test_prompts_in_bfloat16(case: Case) -> None:
    test_prompts_match_the_reference_and_are_the_same_alone(case)


@needs_tiles
def test_a_chunk_that_some_lanes_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that ends right before a chunk of keys, for the first tokens of a tile alone."""
    monkeypatch.setattr(prompt_tiles, "IS_FAST", True)
    case = Case(((40, 300),), sliding_window=20, dtype=BF16)
    for query_len in (40, 30, 16):
        test_matches_reference_and_reads_nothing_else(replace(case, lens=((query_len, 256 + 20 + query_len // 2),)))


@pytest.mark.parametrize("case", [case for case in PROMPTS if case.dtype != BF16], ids=lambda case: case.name)
def test_prompts_match_the_reference_and_are_the_same_alone(case: Case) -> None:
    test_matches_reference_and_reads_nothing_else(case)
    test_a_request_gets_the_same_bits_alone_and_in_a_batch(case)


@pytest.mark.parametrize("sliding_window", [None, 70])
@pytest.mark.parametrize("length", [400, 700])
@pytest.mark.usefixtures("how")
def test_bits_of_bfloat16_however_its_prompt_is_cut(length: int, sliding_window: int | None) -> None:
    case = Case(((length, length),), num_heads=9, num_kv_heads=3, dtype=BF16, sliding_window=sliding_window)
    test_a_token_gets_the_same_bits_however_its_prompt_is_cut(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(((600, 600),), num_heads=9, num_kv_heads=3),
        Case(((2100, 2100),), num_heads=9, num_kv_heads=3),
        Case(((700, 700),), num_heads=8, num_kv_heads=1, head_dim=48, sliding_window=70),
        Case(((2100, 2100),), num_heads=2, num_kv_heads=2, sliding_window=300, sinks=True),
        Case(((600, 600),), num_heads=4, num_kv_heads=2, head_dim=128, softcap=5.0),
        Case(((600, 600),), num_heads=4, num_kv_heads=2, dtype=BF16, softcap=5.0, sinks=True),
        Case(((600, 600),), num_heads=9, num_kv_heads=3, sliding_window=300, fp8=True),
        Case(((600, 600),), num_heads=9, num_kv_heads=3, dtype=BF16, fp8=True),
    ],
    ids=lambda case: case.name,
)
def test_a_token_gets_the_same_bits_however_its_prompt_is_cut(case: Case) -> None:
    """As a decode, too, but for bfloat16 in tiles."""
    whole = build(case)
    expected = attend(whole, case)
    assert torch.equal(expected, attend(replace(whole, metadata=replace(whole.metadata, plans={})), case))
    length = case.lens[0][1]
    in_tiles = prompt_tiles.fits(whole.query, whole.key_cache) and case.softcap is None and not case.sinks
    alone = () if in_tiles else (0, 1, 77, 255, 256, length - 1)
    cuts = ((0, 100), (37, 250), (length - 3, length), (100, length), (200, 258), (255, 257))
    for start, end in (*cuts, *((token, token + 1) for token in alone)):
        starts, seq_lens = np.array([0, end - start], np.int32), np.array([end], np.int32)
        metadata = replace(
            whole.metadata,
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            query_start_loc_np=starts,
            seq_lens_np=seq_lens,
            plans={},
        )
        part = replace(whole, query=whole.query[start:end], metadata=metadata)
        assert torch.equal(attend(part, case), expected[start:end])


def test_one_query_by_hand() -> None:
    """Two keys with scores 0 and log 3: weights 1/4 and 3/4."""
    case = Case(((1, 2),), num_heads=1, num_kv_heads=1, head_dim=2, block_size=1)
    inputs = build(case)
    first, second = inputs.metadata.block_table[0, :2].tolist()
    inputs.key_cache[first, 0, 0], inputs.key_cache[second, 0, 0] = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0])
    inputs.value_cache[first, 0, 0], inputs.value_cache[second, 0, 0] = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 8])
    inputs.query[0, 0] = torch.tensor([5.0, float(np.log(3))])
    out = ops.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.metadata, scale=1.0)
    torch.testing.assert_close(out, torch.tensor([[[1.0, 6.0]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_kv_stores_exactly_the_named_slots(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(5, 6, 8, generator=generator).to(dtype)
    key, value = fused[:, 2:4], fused[:, 4:]  # views into a fused projection: rows are strided
    slots = torch.tensor([7, -1, 0, 11, -1])
    caches = torch.full((2, 3, 4, 2, 8), torch.nan, dtype=dtype)
    expected = caches.clone()
    for token, slot in ((0, 7), (2, 0), (3, 11)):
        expected[0, slot // 4, slot % 4], expected[1, slot // 4, slot % 4] = key[token], value[token]
    for backend in ("cpu", "reference"):
        written, fused_before = caches.clone(), fused.clone()
        with forced_backend(backend):
            ops.write_kv(key, value, written[0], written[1], slots)
        assert torch.equal(*bits(written, expected))
        assert torch.equal(fused, fused_before)


def test_one_sink_by_hand() -> None:
    """Scores 0 and log 2, and a sink of 0: weights 1/4 and 1/2, and 1/4 goes nowhere."""
    case = Case(((1, 2),), num_heads=1, num_kv_heads=1, head_dim=2, block_size=1)
    inputs = build(case)
    first, second = inputs.metadata.block_table[0, :2].tolist()
    inputs.key_cache[first, 0, 0], inputs.key_cache[second, 0, 0] = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0])
    inputs.value_cache[first, 0, 0], inputs.value_cache[second, 0, 0] = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 8])
    inputs.query[0, 0] = torch.tensor([5.0, float(np.log(2))])
    caches = inputs.key_cache, inputs.value_cache
    out = ops.paged_attention(inputs.query, *caches, inputs.metadata, scale=1.0, sinks=torch.zeros(1))
    torch.testing.assert_close(out, torch.tensor([[[1.0, 4.0]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_in_8_bits_holds_what_was_written(dtype: torch.dtype) -> None:
    """Within half a step: 3 bits of mantissa are steps of 1/8 at most, relative to the power of two below; what is
    beyond the largest number is the largest, not infinity."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 5, 2, 8, generator=generator).to(dtype)
    key[1, 0, 0] = 448 * KEY_SCALE * 1.5
    slots = torch.tensor([7, 5, 0, 11, -1])
    stored = []
    for backend in ("cpu", "reference"):
        caches = torch.zeros(2, 3, 4, 2, 8, dtype=torch.float8_e4m3fn)
        with forced_backend(backend):
            ops.write_kv(key, value, *caches, slots, key_scale=KEY_SCALE, value_scale=VALUE_SCALE)
        stored.append(caches)
    assert torch.equal(*(caches.view(torch.uint8) for caches in stored))
    for written, cache, scale in ((key, stored[0][0], KEY_SCALE), (value, stored[0][1], VALUE_SCALE)):
        read = cache.float().flatten(0, 1)[slots[:4]] * scale
        expected = written[:4].float().clamp(max=448 * scale)
        smallest_step = scale * 2**-9  # below 2^-6 the steps do not shrink any more
        torch.testing.assert_close(read, expected, rtol=1 / 16, atol=smallest_step / 2)
    untouched = torch.ones(12, dtype=torch.bool).index_fill(0, slots[:4], value=False)
    assert not stored[0].view(torch.uint8).flatten(1, 2)[:, untouched].any()


def test_write_kv_of_nothing() -> None:
    caches = torch.zeros(2, 3, 4, 2, 8)
    nothing = torch.zeros(0, 2, 8)
    ops.write_kv(nothing, nothing, caches[0], caches[1], torch.zeros(0, dtype=torch.int64))
    ops.write_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), caches[0], caches[1], torch.tensor([-1]))
    assert not caches.any()


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    case = Case(MIXED)
    inputs = build(case)
    query, key_cache, value_cache, metadata = inputs.query, inputs.key_cache, inputs.value_cache, inputs.metadata

    def refused(error: type[Exception], match: str, *args: object, **options: object) -> None:
        with pytest.raises(error, match=match):
            ops.paged_attention(*args, **{"scale": 1.0, **options})  # type: ignore[arg-type]

    refused(ValueError, r"must both be \[num_blocks", query, key_cache, value_cache[1:], metadata)
    refused(ValueError, "must be contiguous", query, key_cache.transpose(1, 2), value_cache.transpose(1, 2), metadata)
    refused(
        TypeError,
        "query is torch.float64, the cache is torch.float32",
        query.double(),
        key_cache,
        value_cache,
        metadata,
    )
    refused(ValueError, "3 query heads cannot share 2 KV heads", query[:, :3], key_cache, value_cache, metadata)
    refused(ValueError, r"must be \[num_tokens, heads, 64\]", query[..., :32], key_cache, value_cache, metadata)
    refused(ValueError, "its stride is 2", torch.zeros(9, 4, 128)[..., ::2], key_cache, value_cache, metadata)
    refused(ValueError, "sliding_window must be at least 1", query, key_cache, value_cache, metadata, sliding_window=0)
    refused(ValueError, "scale must be positive", query, key_cache, value_cache, metadata, scale=0.0)
    refused(ValueError, "softcap must be positive", query, key_cache, value_cache, metadata, softcap=-1.0)
    refused(ValueError, r"sinks must have shape \(4,\)", query, key_cache, value_cache, metadata, sinks=torch.ones(2))
    refused(TypeError, "the caches must share one of", query, key_cache.double(), value_cache.double(), metadata)
    refused(ValueError, "at most 31", query[:31], key_cache, value_cache, metadata)
    long_table = replace(metadata, block_table=metadata.block_table.long(), plans={})
    refused(TypeError, "block_table must be torch.int32", query, key_cache, value_cache, long_table)
    short = replace(metadata, block_table=metadata.block_table[:, :3].contiguous(), plans={})
    refused(ValueError, "seq_len 64 does not fit in 3 blocks of 16", query, key_cache, value_cache, short)
    too_many = replace(metadata, seq_lens_np=np.zeros(len(MIXED), np.int32), plans={})
    refused(ValueError, "query_len <= seq_len", query, key_cache, value_cache, too_many)

    row = torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match="key has 1 KV heads, the cache has 2"):
        ops.write_kv(row[:, :1], row[:, :1], key_cache, value_cache, torch.tensor([0]))
    with pytest.raises(TypeError, match=r"slot_mapping must be torch\.int64"):
        ops.write_kv(row, row, key_cache, value_cache, torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"slot_mapping must have shape \(1,\)"):
        ops.write_kv(row, row, key_cache, value_cache, torch.tensor([0, 1]))


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="no backend 'cuda'; there are reference, cpu, triton"), forced_backend("cuda"):
        pass


def test_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, quire.kernels.ops as ops\n"
        "caches = torch.zeros(2, 1, 1, 1, 8)\n"
        "ops.write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), caches[0], caches[1], torch.tensor([0]))\n"
        "assert caches.sum() == 16\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
