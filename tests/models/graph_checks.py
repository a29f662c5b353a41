"""Decode steps as graphs compute what the same steps do kernel by kernel, for every size of batch, two in flight.

On a GPU the graphs are CUDA's (`python -m tests.gpu`); on CPU they repeat the call (`test_steps_in_flight.py`). The
models are small random ones that are made here: no file is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import numpy as np
import torch

from quire.engine.config import Quantization
from quire.engine.kv_cache_spec import KVCacheConfig, group_layers
from quire.engine.outputs import BlockUpdate, NewRow, SchedulerOutput
from quire.engine.sampling_params import SamplingParams
from quire.kernels import fp8, ops
from quire.kernels.packed import IN_8_BITS
from quire.kernels.triton import chain
from quire.workers.decode_graphs import DecodeGraphs, End, GraphBackend, graph_sizes
from quire.workers.kv_cache import allocate_kv_cache
from quire.workers.launched_step import LaunchedStep
from quire.workers.layers.attention import KVScales
from quire.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.workers.layers.moe import ExpertWeights
from quire.workers.layers.parameter import PackedParameter
from quire.workers.model_runner import ModelRunner, StepLimits
from quire.workers.models.decoder import Decoder
from quire.workers.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    QKNormSpec,
    RotarySpec,
)
from quire.workers.parallel import ParallelContext
from quire.workers.quantization import quantize

BLOCK_SIZE = 16
NUM_BLOCKS_PER_ROW = 3
NUM_STEPS = 12
VOCAB_SIZE = 197


@dataclass(frozen=True)
class GraphCase:
    """What a model is made of, and how large batches become."""

    max_num_seqs: int
    dtype: torch.dtype = torch.float32
    experts: bool = False
    quantization: Quantization | None = None
    packed: bool = False
    cache_dtype: torch.dtype | None = None
    plain: Literal["greedy", "drawn"] | None = None  # all requests, so that graphs go on to tokens
    apart: bool = False  # compared with kernels none of which is launched before the last one is done

    @property
    def name(self) -> str:
        parts = ["graph", str(self.dtype).removeprefix("torch."), *(["experts"] if self.experts else [])]
        parts += [self.quantization] if self.quantization else []
        parts += ["packed"] if self.packed else []
        parts += [self.plain] if self.plain else []
        parts += ["apart"] if self.apart else []
        return "-".join([*parts, *(["fp8-cache"] if self.cache_dtype else [])])

    @property
    def batches(self) -> list[int]:
        """Sizes of batches: for every size of graph, one that fills it, and one that is padded. In 16 bits, only those
        that fill it: a library that multiplies one row more may round otherwise."""
        sizes = graph_sizes(self.max_num_seqs)
        padded = [size - 1 for size in sizes if size > 1] if self.dtype == torch.float32 else []
        return sorted({*sizes, *padded})


CASES = [
    GraphCase(64),
    GraphCase(18, experts=True),
    GraphCase(18, quantization="int8"),
    GraphCase(18, experts=True, quantization="fp8", cache_dtype=fp8.DTYPE),
    GraphCase(18, torch.bfloat16, experts=True, quantization="int8"),
    GraphCase(18, torch.bfloat16, cache_dtype=fp8.DTYPE),
    GraphCase(18, packed=True),
    GraphCase(18, torch.bfloat16, experts=True, packed=True),
    GraphCase(18, torch.bfloat16, apart=True),
    GraphCase(18, plain="greedy"),
    GraphCase(18, plain="drawn"),
]


def make_model(
    device: torch.device,
    dtype: torch.dtype,
    *,
    experts: bool = False,
    quantization: Quantization | None = None,
    packed: bool = False,
) -> Decoder:
    """Two layers, one of them with a sliding window; weights large enough that tokens depend on the whole context. With
    experts, queries and keys are normalized, too."""
    norm = NormSpec("rms", 1e-5)
    mlp = MoESpec(32, num_experts=7, num_experts_per_token=3, renormalize=True) if experts else MLPSpec(96)

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            4, 2, 32, 32**-0.5, RotarySpec(32, 10000.0), sliding_window=window,
            qk_norm=QKNormSpec(norm, "head") if experts else None,
        )  # fmt: skip
        return LayerSpec(attention, mlp, norm, norm)

    spec = DecoderSpec(VOCAB_SIZE, 64, norm, tie_embeddings=False, layers=(layer(None), layer(9)))
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Decoder(spec, ParallelContext())
    finally:
        torch.set_default_dtype(default)
    if quantization is not None:
        quantize(model, quantization, device, {})
    if packed:
        pack_in_8_bits(model, device)
    generator = torch.Generator().manual_seed(int(experts))
    for name, parameter in model.named_parameters():
        values = torch.ones(parameter.matrix_shape)
        if "norm" not in name:
            values.normal_(0.0, 0.2, generator=generator)
        if isinstance(parameter, PackedParameter) and values.dim() == 3:
            for i, matrix in enumerate(values):
                parameter.fill(matrix, (slice(i, i + 1), slice(None), slice(None)))
        else:
            parameter.fill(values)
    return model.to(device).eval()


def pack_in_8_bits(model: Decoder, device: torch.device) -> None:
    """What kernels multiply so, which is most of it."""
    num_packed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if module is model.embedding or not isinstance(
            module, (ColumnParallelLinear, RowParallelLinear, ExpertWeights)
        ):
            continue
        if PackedParameter.can_pack(weight, IN_8_BITS, device, in_int8=False):
            with device:
                module.weight = PackedParameter.like(
                    weight, IN_8_BITS, device, is_head=False, is_looked_up=False, in_int8=False
                )
            num_packed += 1
    assert num_packed >= 4


def make_runner(
    model: Decoder, max_num_seqs: int, device: torch.device, cache_dtype: torch.dtype | None = None
) -> ModelRunner:
    dtype = cache_dtype or next(p.dtype for p in model.parameters() if p.dtype in ops.DTYPES)
    specs = model.kv_cache_specs(BLOCK_SIZE, dtype)
    groups = group_layers(specs, 1)
    config = KVCacheConfig(1 + max_num_seqs * NUM_BLOCKS_PER_ROW * len(groups), BLOCK_SIZE, groups)
    caches = allocate_kv_cache(config, specs, [KVScales()] * len(specs), model.own_layers, dtype, device)
    limits = StepLimits(max_num_seqs, max_num_seqs * BLOCK_SIZE, NUM_BLOCKS_PER_ROW * BLOCK_SIZE, 2)
    return ModelRunner(model, caches, config, limits, device)


def steps_of(num_reqs: int, num_groups: int, plain: str | None = None) -> list[SchedulerOutput]:
    """`num_reqs` prompts of 1 to 16 tokens in one step, then one token of each at a time, with new blocks on the way.

    Rows are given out from the last one, and their blocks lie apart.
    """
    rows = np.arange(num_reqs, dtype=np.int32)[::-1].copy()
    lengths = (5 * rows % BLOCK_SIZE + 1).astype(np.int32)

    def block(row: int, index: int, group: int) -> int:
        return 1 + (index * num_groups + group) * num_reqs + row

    new_rows = [
        NewRow(
            row=row,
            request_id=str(row),
            token_ids=[(7 * row + i) % VOCAB_SIZE for i in range(length)],
            num_prompt_tokens=length,
            sampling_params=_sampling_params(row, plain),
            seed=row,
            choice_index=0,
            eos_token_ids=(),
            block_ids=tuple([block(row, 0, group)] for group in range(num_groups)),
        )
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
    ]
    first = SchedulerOutput(
        step_id=0,
        rows=rows,
        num_scheduled_tokens=lengths,
        num_computed_tokens=np.zeros_like(rows),
        new_rows=new_rows,
        released_rows=rows.tolist(),
    )
    steps = [first]
    for step_id in range(1, NUM_STEPS):
        computed = lengths + step_id - 1
        updates = [
            BlockUpdate(row, group, length // BLOCK_SIZE, [block(row, length // BLOCK_SIZE, group)])
            for row, length in zip(rows.tolist(), computed.tolist(), strict=True)
            for group in range(num_groups)
            if length % BLOCK_SIZE == 0
        ]
        steps.append(
            SchedulerOutput(
                step_id=step_id,
                rows=rows,
                num_scheduled_tokens=np.ones_like(rows),
                num_computed_tokens=computed,
                block_updates=updates,
            )
        )
    return steps


def _sampling_params(row: int, plain: str | None) -> SamplingParams:
    if plain is None:
        return SamplingParams(temperature=row % 2, presence_penalty=float(row % 5 == 4), max_tokens=99)
    if plain == "greedy":
        return SamplingParams(temperature=0, max_tokens=99)
    return SamplingParams(temperature=1 - 0.5 * (row % 3), top_k=row % 4 * 9, top_p=1 - row % 2 * 0.2, max_tokens=99)


def tokens_of(runner: ModelRunner, steps: list[SchedulerOutput]) -> np.ndarray:
    """[num_steps, num_reqs] what the steps sample, each launched before the result of the last one is read."""
    under_way: deque[LaunchedStep] = deque()
    sampled = []
    for step in steps:
        under_way.append(runner.launch(step))
        if len(under_way) > 1:
            sampled.append(under_way.popleft().result().sampled_token_ids[:, 0])
    return np.stack([*sampled, *(each.result().sampled_token_ids[:, 0] for each in under_way)])


@contextmanager
def kernels_apart() -> Iterator[None]:
    """Each kernel waits until the one before it is done, whatever the GPU can. (Below compute capability 9.0, and on a
    CPU, all do.)"""
    with mock.patch.object(chain, "devices", SimpleNamespace(capability=lambda device: None)):
        yield


def run_graph_checks(
    case: GraphCase, device: torch.device, make_backend: Callable[[], GraphBackend]
) -> dict[str, str | None]:
    """Check name -> None, or what was wrong."""
    kinds = {"experts": case.experts, "quantization": case.quantization, "packed": case.packed}
    model = make_model(device, case.dtype, **kinds)
    num_groups = len(group_layers(model.kv_cache_specs(BLOCK_SIZE, case.dtype), 1))
    eager, graphs = (make_runner(model, case.max_num_seqs, device, case.cache_dtype) for _ in range(2))
    graphs.capture_graphs(make_backend())
    results: dict[str, str | None] = {}
    for num_reqs in case.batches:
        with kernels_apart() if case.apart else nullcontext():
            expected = tokens_of(eager, steps_of(num_reqs, num_groups, case.plain))
        with mock.patch.object(DecodeGraphs, "begin", autospec=True, side_effect=DecodeGraphs.begin) as begin:
            found = tokens_of(graphs, steps_of(num_reqs, num_groups, case.plain))
        ends = {call.args[3] for call in begin.call_args_list[-(NUM_STEPS - 1) :]}
        ways = {"in graphs": found}
        if case.apart:
            ways["kernel by kernel"] = tokens_of(eager, steps_of(num_reqs, num_groups, case.plain))
        differ = {way: np.flatnonzero((expected != tokens).any(axis=0)).tolist() for way, tokens in ways.items()}
        problem = f"requests got other tokens: {differ}" if any(differ.values()) else None
        if case.plain is not None and ends != {End.TOKENS if case.plain == "greedy" else End.DRAWN}:
            problem = f"the graphs went to {sorted(end.name for end in ends)}"
        if len(np.unique(expected[:, 0])) < 3:
            problem = "the tokens repeat themselves: they prove nothing"
        results[f"{case.name}-{num_reqs}-requests"] = problem
    return results
