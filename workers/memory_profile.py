"""How much memory there is, and how much of it the KV cache may have."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.kv_cache_groups import policy_for
from quire.engine.kv_cache_spec import KVCacheSpec, block_bytes, group_layers

from .cgroup import free_below_limits

logger = logging.getLogger(__name__)

# Of what is free after loading. The rest is left to activations, other engines and the rest of the machine, whose
# needs are not known here; `cache.memory_bytes` overrides it.
HOST_CACHE_SHARE = 0.25


def free_bytes(device: torch.device) -> int:
    """Memory that this process could still take: of the GPU, or of the host within its container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min([_mem_available(Path("/proc/meminfo")), *free_below_limits()])


def check_weights_fit(weight_bytes: Sequence[int], free: int, device: torch.device, name: str) -> None:
    """Raise `ConfigError`, saying how much is missing, when the weights of the ranks that share a memory do not fit.

    `free` is what was free before the first of them began to load.
    """
    total, num_ranks = sum(weight_bytes), len(weight_bytes)
    if total > free:
        ranks = "each rank" if num_ranks == 1 else f"the {num_ranks} ranks of a host"
        raise ConfigError(
            f"model: the weights of {name} take {total:,} bytes on {ranks}; {free:,} are free on {device.type}, "
            f"{total - free:,} are missing."
        )


def kv_cache_bytes(
    config: EngineConfig,
    specs: list[KVCacheSpec],
    max_model_len: int,
    device: torch.device,
    activation_bytes: int,
    reserved_bytes: int = 0,
    stage: int = 0,
    host_ranks: Sequence[int] | None = None,
) -> int:
    """Bytes that one rank of a stage gives to its KV cache: what the user says, else a share of what is free.

    Never more than `max_num_seqs` requests of `max_model_len` could use. `activation_bytes` is what a step needs beside
    the weights (measured on GPU); `reserved_bytes` are still free but spoken for; `host_ranks` share this rank's host
    and, on CPU, its memory (all ranks if None). Raises `ConfigError`, saying how much is missing, when what the user
    says is not there.
    """
    free = max(0, free_bytes(device) - reserved_bytes)
    num_stages, tensor_size = config.parallel.pipeline_parallel_size, config.parallel.tensor_parallel_size
    bytes_per_block = block_bytes(specs, num_stages, stage)
    if device.type == "cuda":
        stages = [stage]
    else:
        ranks = range(config.parallel.world_size) if host_ranks is None else host_ranks
        stages = [rank // tensor_size for rank in ranks]  # of all that share this memory
    if config.cache.num_kv_blocks is not None:
        blocks = config.cache.num_kv_blocks
        together = [blocks * block_bytes(specs, num_stages, each) for each in stages]
        return _available("num_kv_blocks", blocks * bytes_per_block, together, free)
    if config.cache.memory_bytes is not None:
        wanted = config.cache.memory_bytes
        return _available("memory_bytes", wanted, [wanted] * len(stages), free)
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        usable = int(total * config.cache.gpu_memory_utilization) - (total - free) - activation_bytes
    else:
        usable = int(free * HOST_CACHE_SHARE) // len(stages)
    chunk = config.scheduler.max_num_batched_tokens
    groups = group_layers(specs, num_stages)
    blocks_per_request = sum(policy_for(group.spec).max_blocks(max_model_len, chunk) for group in groups)
    most = (config.scheduler.max_num_seqs * blocks_per_request + 1) * bytes_per_block  # and the null block
    logger.info("KV cache: %d bytes usable of %d free on %s, %d useful", usable, free, device.type, most)
    return max(0, min(usable, most))


def _available(key: str, wanted: int, together: list[int], free: int) -> int:
    """`wanted`, unless what is wanted by all ranks that share a memory is not there."""
    total, num_ranks = sum(together), len(together)
    if total > free:
        ranks = "" if num_ranks == 1 else f", {total:,} on the {num_ranks} ranks of a host,"
        raise ConfigError(
            f"cache.{key}: a KV cache of {wanted:,} bytes per rank{ranks} does not fit: {free:,} are free, "
            f"{total - free:,} are missing."
        )
    return wanted


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"cache.memory_bytes: must be given, because {meminfo} does not say what is available.")
