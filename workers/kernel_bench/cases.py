"""The operations of a layer, at the sizes that serving has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.kernels import fp8, ops
from quire.kernels.packed import PACKINGS, Packing
from quire.kernels.sampling import DTYPES, Draws, draw_tokens

from .shapes import LayerShape
from .work import Work, attention_work, choice_work, draw_work, experts_work, linear_work, write_kv_work

GROUPS = ("attention", "write_kv", "linear", "experts", "draw")
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    group: str
    name: str
    work: Work
    dtype: torch.dtype  # in which it computes
    make: Callable[[], Run]  # allocates what the operation needs


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each. Contexts of decodes are (batch, tokens)."""

    decodes: Sequence[tuple[int, int]]
    prefills: Sequence[int]
    rows: Sequence[int]  # of linear layers, and tokens of experts
    tokens: Sequence[int]  # of `write_kv`
    draws: Sequence[int]  # rows of logits


GPU_SIZES = Sizes(
    decodes=((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32768), (16, 8192)),
    prefills=(2048, 8192, 32768),
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 2048, 8192),
    tokens=(1, 256, 8192),
    draws=(1, 64, 256),
)
CPU_SIZES = Sizes(
    decodes=((1, 1024), (8, 1024), (32, 512)),
    prefills=(512, 2048),
    rows=(1, 2, 4, 8, 16, 32, 512),
    tokens=(1, 512),
    draws=(1, 8),
)
TINY_SIZES = Sizes(decodes=((1, 40), (3, 20)), prefills=(30,), rows=(1, 5), tokens=(7,), draws=(3,))


def cases(
    shape: LayerShape, sizes: Sizes, device: torch.device, dtype: torch.dtype, block_size: int, groups: Sequence[str]
) -> Iterator[Case]:
    """All of them, those of a group together."""
    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "attention": lambda: _attention(shape, sizes, device, dtype, block_size),
        "write_kv": lambda: _write_kv(shape, sizes, device, dtype, block_size),
        "linear": lambda: _linear(shape, sizes, device, dtype),
        "experts": lambda: _experts(shape, sizes, device, dtype),
        "draw": lambda: _draw(shape, sizes, device, dtype),
    }
    for group in groups:
        yield from makers[group]()


def _attention(
    shape: LayerShape, sizes: Sizes, device: torch.device, dtype: torch.dtype, block_size: int
) -> Iterator[Case]:
    batches = [(f"decode {batch} x {context}", [(1, context)] * batch) for batch, context in sizes.decodes]
    batches += [(f"prefill {tokens}", [(tokens, tokens)]) for tokens in sizes.prefills]
    for cache_dtype in (dtype, fp8.DTYPE):
        for name, lens in batches:
            work = attention_work(
                lens,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                size=dtype.itemsize,
                cache_size=cache_dtype.itemsize,
            )
            label = name if cache_dtype == dtype else f"{name}, fp8 cache"
            yield Case(
                "attention",
                label,
                work,
                dtype,
                lambda lens=lens, cache=cache_dtype: attention_run(shape, lens, device, dtype, cache, block_size),  # type: ignore[misc]
            )


def attention_run(
    shape: LayerShape,
    lens: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
) -> Run:
    """Attention of one batch; its blocks lie in any order."""
    query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*lens, strict=True))
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    blocks_each = -(-int(seq_lens.max()) // block_size)
    num_blocks = blocks_each * len(lens)
    num_tokens = int(starts[-1])
    cache_shape = (2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    caches = torch.randn(cache_shape, device=device, dtype=dtype).to(cache_dtype)
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    table = torch.randperm(num_blocks, device=device).to(torch.int32).view(len(lens), blocks_each)
    metadata = ops.AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=table,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        query_start_loc_np=starts,
        seq_lens_np=seq_lens,
    )
    return lambda: ops.paged_attention(query, caches[0], caches[1], metadata, scale=shape.head_dim**-0.5)


def _write_kv(
    shape: LayerShape, sizes: Sizes, device: torch.device, dtype: torch.dtype, block_size: int
) -> Iterator[Case]:
    heads = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}

    def make(num_tokens: int) -> Run:
        num_blocks = 2 * -(-num_tokens // block_size)
        key, value = torch.randn(2, num_tokens, *heads.values(), device=device, dtype=dtype)
        caches = torch.zeros(2, num_blocks, block_size, *heads.values(), device=device, dtype=dtype)
        slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
        return lambda: ops.write_kv(key, value, caches[0], caches[1], slots)

    for num_tokens in sizes.tokens:
        work = write_kv_work(num_tokens, **heads, size=dtype.itemsize, cache_size=dtype.itemsize)
        yield Case("write_kv", f"{num_tokens} tokens", work, dtype, lambda tokens=num_tokens: make(tokens))  # type: ignore[misc]


def _linear(shape: LayerShape, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Gate and up: the largest matrix of a layer."""
    out_features, in_features = 2 * shape.intermediate_size, shape.hidden_size
    # As the default model's file has it; on a GPU as AWQ and GPTQ have it.
    packing = PACKINGS["q4_1" if device.type == "cpu" else "z4_128"]
    weights: dict[str, torch.dtype | Packing] = {str(dtype).removeprefix("torch."): dtype, "int8": torch.int8}
    if device.type != "cpu":  # there it is to save memory, and known to be slow
        weights["fp8"] = fp8.DTYPE
    kinds = [(kind, weight, False) for kind, weight in weights.items()]
    for name, in_int8 in ((packing.name, False), (f"{packing.name} in int8", True)):
        if ops.fits_packed((out_features, in_features), packing, dtype, device, in_int8=in_int8):
            kinds.append((name, packing, in_int8))
    for kind, weight, in_int8 in kinds:
        for num_rows in sizes.rows:
            bits = packing.bits_per_number if isinstance(weight, Packing) else 8 * weight.itemsize
            work = linear_work(num_rows, out_features, in_features, size=dtype.itemsize, weight_bits=bits)
            yield Case(
                "linear",
                f"{kind} {out_features} x {in_features}, {num_rows} rows",
                work,
                dtype,
                lambda rows=num_rows, weight=weight, in_int8=in_int8: linear_run(  # type: ignore[misc]
                    rows, out_features, in_features, device, dtype, weight, in_int8=in_int8
                ),
            )


def linear_run(
    num_rows: int,
    out_features: int,
    in_features: int,
    device: torch.device,
    dtype: torch.dtype,
    weight: torch.dtype | Packing,
    *,
    in_int8: bool = False,
) -> Run:
    """A linear layer with weights of a dtype, or packed and multiplied as they are, or in int8."""
    x = torch.randn(num_rows, in_features, device=device, dtype=dtype)
    if isinstance(weight, Packing):
        packed = _packed(out_features, in_features, weight, device, dtype, in_int8=in_int8)
        return lambda: ops.linear_packed(x, packed, weight, in_int8=in_int8)
    numbers = torch.randn(out_features, in_features, device=device, dtype=dtype)
    if weight == dtype:
        return lambda: ops.linear(x, numbers)
    stored, scales = (numbers * 30).to(weight), torch.ones(out_features, device=device)
    operation = ops.linear_int8 if weight == torch.int8 else ops.linear_fp8
    return lambda: operation(x, stored, scales)


def _packed(
    out_features: int, in_features: int, packing: Packing, device: torch.device, dtype: torch.dtype, *, in_int8: bool
) -> Tensor:
    """A random weight, as `ops.linear_packed` takes it."""
    rows = torch.randint(256, (out_features, packing.row_bytes(in_features)), dtype=torch.uint8, device=device)
    halves, *_ = packing.parts(rows)
    halves.copy_(torch.randn(out_features, halves.shape[1] // 2, device=device).half().view(torch.uint8))
    return ops.lay_out_packed(rows, packing, dtype, in_int8=in_int8)


def _experts(shape: LayerShape, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    if not shape.num_experts:
        return
    of = f"{shape.experts_per_token} of {shape.num_experts}"
    for num_tokens in sizes.rows:
        work = choice_work(num_tokens, shape.num_experts, shape.experts_per_token, size=dtype.itemsize)
        make = partial(_choice_run, num_tokens, shape, device, dtype)
        yield Case("experts", f"choose {of}, {num_tokens} tokens", work, dtype, make)
    packing = PACKINGS["mxfp4"]
    kinds: list[Packing | None] = [None]
    matrices = (2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size)
    if device.type != "cpu" and all(ops.fits_packed(each, packing, dtype, device) for each in matrices):
        kinds.append(packing)
    for kind, num_tokens in itertools.product(kinds, sizes.rows):
        chosen = _chosen(shape, num_tokens)
        work = experts_work(
            num_tokens,
            shape.experts_per_token,
            int(chosen.flatten().bincount().count_nonzero()),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            size=dtype.itemsize,
            weight_bits=8 * dtype.itemsize if kind is None else kind.bits_per_number,
        )
        name = f"{'' if kind is None else f'{kind.name} '}{of}, {num_tokens} tokens"
        make = partial(experts_run, shape, chosen, device, dtype, kind)
        yield Case("experts", name, work, dtype, make)


def _choice_run(num_tokens: int, shape: LayerShape, device: torch.device, dtype: torch.dtype) -> Run:
    logits = torch.randn(num_tokens, shape.num_experts, device=device, dtype=dtype)
    return lambda: ops.choose_experts(logits, shape.experts_per_token, renormalize=True)


def _chosen(shape: LayerShape, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.rand(num_tokens, shape.num_experts, generator=generator).topk(shape.experts_per_token).indices


def experts_run(
    shape: LayerShape, chosen: Tensor, device: torch.device, dtype: torch.dtype, packing: Packing | None = None
) -> Run:
    """A mixture of experts, perhaps packed, for tokens that chose these."""
    hidden_size, size = shape.hidden_size, shape.intermediate_size
    x = torch.randn(len(chosen), hidden_size, device=device, dtype=dtype)

    def matrices(num_rows: int, num_columns: int) -> ops.ExpertMatrices:
        if packing is None:
            return ops.ExpertMatrices(torch.randn(shape.num_experts, num_rows, num_columns, device=device, dtype=dtype))
        rows = _packed(shape.num_experts * num_rows, num_columns, packing, device, dtype, in_int8=False)
        return ops.ExpertMatrices(rows.view(shape.num_experts, num_rows, -1), packing=packing)

    gate_up, down = matrices(2 * size, hidden_size), matrices(hidden_size, size)
    routing, chosen = torch.rand(chosen.shape, device=device), chosen.to(device)
    return lambda: ops.experts(
        x,
        chosen,
        routing,
        gate_up,
        down,
        activation="silu",
        num_experts_in_all=shape.num_experts,
    )


def _draw(shape: LayerShape, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for num_rows in sizes.draws:
        for name, top_k, top_p in (("temperature", 0, 1.0), ("top-p 0.9", 0, 0.9), ("top-k 50, top-p 0.9", 50, 0.9)):
            make = partial(_draw_run, shape.vocab_size, num_rows, top_k, top_p, device, dtype)
            work = draw_work(num_rows, shape.vocab_size)
            yield Case("draw", f"{name}, {num_rows} x {shape.vocab_size}", work, torch.float32, make)


def _draw_run(vocab: int, num_rows: int, top_k: int, top_p: float, device: torch.device, dtype: torch.dtype) -> Run:
    """Logits as a model of this type leaves them: rounded to it, a few far above the others."""
    logits = 2.5 * torch.randn(num_rows, vocab, device=device)
    logits[:, ::997] += 8
    logits = logits.to(dtype).float()
    values = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": 0.0, "numbers": 0.5}
    draws = Draws(
        **{name: torch.full((num_rows,), value, dtype=DTYPES[name], device=device) for name, value in values.items()}
    )
    return lambda: draw_tokens(logits, draws)
