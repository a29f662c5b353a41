"""What a model needs and whether this machine has it, without loading it: `quire check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.kv_cache_groups import policy_for
from quire.engine.kv_cache_spec import KVCacheSpec, block_bytes, group_layers
from quire.engine.model_source import Implementation, ModelInfo

from .layers.parameter import num_bytes, num_weights
from .loader.kv_scales import kv_scales
from .memory_profile import free_bytes, kv_cache_bytes
from .models.sizes import check_ranks
from .parallel import Grid, ParallelContext
from .quantization import blueprint_for
from .worker import building, resolve_cache_dtype, resolve_device, resolve_dtype


class Capacity(NamedTuple):
    """What the KV cache of one engine would hold."""

    cache_bytes: int  # on the rank that can hold the fewest blocks
    num_tokens: int  # of requests short enough for any window
    num_full_requests: int  # of `max_model_len` tokens, at the same time


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A model on this machine, as it is configured."""

    architecture: str
    implementation: Implementation
    format: str
    max_model_len: int
    num_parameters: int  # tied ones once, padding not counted
    dtype: str
    cache_dtype: str
    device: str
    grid: Grid
    weight_bytes: tuple[int, ...]  # of each rank
    kv_bytes_per_token: int  # on the rank with the most, in all its layers
    kv_window_bytes_per_token: int  # of these, in layers that keep only a window
    free_bytes: int  # before loading
    capacity: Capacity | None  # None: it does not fit
    advice: str  # why it does not fit and what would, else empty

    def __str__(self) -> str:
        per_stage = self.grid.tensor_size
        stages = [self.weight_bytes[i : i + per_stage] for i in range(0, len(self.weight_bytes), per_stage)]
        per_rank = " | ".join(", ".join(f"{size:,}" for size in stage) for stage in stages)
        window = (
            f" ({self.kv_window_bytes_per_token:,} of them only in a window)" if self.kv_window_bytes_per_token else ""
        )
        lines = {
            "family": f"{self.architecture} ({self.format})",
            "computed by": str(self.implementation),
            "parameters": f"{self.num_parameters:,}",
            "context": f"{self.max_model_len:,} tokens",
            "weights": f"{per_rank} bytes{' (ranks; stages by |)' if len(stages) > 1 else ' (ranks)'}, "
            f"{sum(self.weight_bytes):,} together, {self.dtype} on {self.device}"
            if len(self.weight_bytes) > 1
            else f"{per_rank} bytes, {self.dtype} on {self.device}",
            "KV cache": f"{self.kv_bytes_per_token:,} bytes per token and rank, {self.cache_dtype}{window}",
            "free memory": f"{self.free_bytes:,} bytes",
            "fits": self.advice,
        }
        if self.capacity is not None:
            held = f"{self.capacity.cache_bytes:,} bytes of KV cache hold {self.capacity.num_tokens:,} tokens, "
            lines["fits"] = (
                f"yes: {held}{self.capacity.num_full_requests:,} requests of the whole context"
                if self.capacity.num_full_requests
                else f"yes, but no request of the whole context: {held}and longer requests are refused"
            )
        return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def check_model(config: EngineConfig, info: ModelInfo) -> ModelCheck:
    """Raises `ConfigError` when the model cannot work wherever it runs: its tensors do not match, or cannot be cut."""
    check_ranks(config, info)
    device = resolve_device(config.model.device)
    blueprint = blueprint_for(config.model, info, device)
    dtype = resolve_dtype(config.model.dtype, device, info)
    grid = Grid.of(config.parallel)
    with building(torch.device("meta"), dtype):
        whole = blueprint.build(ParallelContext())
        ranks = [blueprint.build(ParallelContext(rank, grid)) for rank in range(grid.world_size)]
    if config.model.load_format != "dummy":
        blueprint.check(whole, info)
    weight_bytes = tuple(num_bytes(rank.parameters()) for rank in ranks)
    kv_scales(config, info, len(whole.kv_cache_specs(1, dtype)))
    cache_dtype = resolve_cache_dtype(config, dtype)
    specs = ranks[0].kv_cache_specs(config.cache.block_size, cache_dtype)
    most = max(([specs[layer] for layer in rank.own_layers] for rank in ranks), key=_per_token)
    free = free_bytes(device)
    # Ranks on one host share its memory; a GPU is its rank's alone.
    reserved = max(weight_bytes) if device.type == "cuda" else sum(weight_bytes)
    try:
        stages = [
            _capacity(config, specs, info.max_model_len, device, reserved, stage) for stage in range(grid.num_stages)
        ]
        capacity, advice = min(stages, key=lambda stage: stage.num_tokens), ""
    except ConfigError as error:
        capacity, advice = None, f"no: {error.message}"
    return ModelCheck(
        architecture=blueprint.architecture,
        implementation=blueprint.implementation,
        format=info.format,
        max_model_len=info.max_model_len,
        num_parameters=num_weights(whole.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        cache_dtype=str(cache_dtype).removeprefix("torch."),
        device=str(device),
        grid=grid,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=_per_token(most),
        kv_window_bytes_per_token=_per_token([spec for spec in most if spec.sliding_window is not None]),
        free_bytes=free,
        capacity=capacity,
        advice=advice,
    )


def _per_token(specs: list[KVCacheSpec]) -> int:
    return sum(spec.block_bytes // spec.block_size for spec in specs)


def _capacity(
    config: EngineConfig, specs: list[KVCacheSpec], max_model_len: int, device: torch.device, reserved: int, stage: int
) -> Capacity:
    """What a rank of a stage can hold. Raises `ConfigError`, saying what is missing and what would fit."""
    free, num_stages = free_bytes(device), config.parallel.pipeline_parallel_size
    if reserved > free:
        raise ConfigError(
            f"the weights take {reserved:,} bytes, {reserved - free:,} more than are free. "
            "A shorter dtype or, on GPUs, a larger tensor_parallel_size or pipeline_parallel_size makes them smaller."
        )
    cache_bytes = kv_cache_bytes(config, specs, max_model_len, device, 0, reserved_bytes=reserved, stage=stage)
    groups = group_layers(specs, num_stages)
    bytes_per_block = block_bytes(specs, num_stages, stage)
    num_blocks = (config.cache.num_kv_blocks or cache_bytes // bytes_per_block) - 1  # one is the null block
    chunk = config.scheduler.max_num_batched_tokens
    per_request = sum(policy_for(group.spec).max_blocks(max_model_len, chunk) for group in groups)
    if num_blocks < len(groups):
        raise ConfigError(f"{cache_bytes:,} bytes of KV cache are less than one block of each group of layers.")
    return Capacity(cache_bytes, num_blocks // len(groups) * config.cache.block_size, num_blocks // per_request)
