"""How much memory there is, and how much of it the KV cache may have."""

from __future__ import annotations

import logging
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


def check_weights_fit(weight_bytes: int, device: torch.device, name: str) -> None:
    """Raise `ConfigError`, saying how much is missing, when the weights of one rank do not fit."""
    free = free_bytes(device)
    if weight_bytes > free:
        raise ConfigError(
            f"model: the weights of {name} take {weight_bytes:,} bytes on each rank; {free:,} are free on "
            f"{device.type}, {weight_bytes - free:,} are missing."
        )


def kv_cache_bytes(
    config: EngineConfig,
    specs: list[KVCacheSpec],
    max_model_len: int,
    device: torch.device,
    activation_bytes: int,
    reserved_bytes: int = 0,
    stage: int = 0,
) -> int:
    """Bytes that one rank of a stage gives to its KV cache: what the user says, else a share of what is free.

    Never more than `max_num_seqs` requests of `max_model_len` could use. `activation_bytes` is what a step needs beside
    the weights (measured on GPU); `reserved_bytes` are still free but spoken for. Raises `ConfigError`, saying how much
    is missing, when what the user says is not there.
    """
    free = max(0, free_bytes(device) - reserved_bytes)
    num_stages = config.parallel.pipeline_parallel_size
    bytes_per_block = block_bytes(specs, num_stages, stage)
    if config.cache.num_kv_blocks is not None:
        return _available("num_kv_blocks", config.cache.num_kv_blocks * bytes_per_block, free)
    if config.cache.memory_bytes is not None:
        return _available("memory_bytes", config.cache.memory_bytes, free)
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        usable = int(total * config.cache.gpu_memory_utilization) - (total - free) - activation_bytes
    else:
        usable = int(free * HOST_CACHE_SHARE) // config.parallel.world_size
    chunk = config.scheduler.max_num_batched_tokens
    groups = group_layers(specs, num_stages)
    blocks_per_request = sum(policy_for(group.spec).max_blocks(max_model_len, chunk) for group in groups)
    most = (config.scheduler.max_num_seqs * blocks_per_request + 1) * bytes_per_block  # and the null block
    logger.info("KV cache: %d bytes usable of %d free on %s, %d useful", usable, free, device.type, most)
    return max(0, min(usable, most))


def _available(key: str, wanted: int, free: int) -> int:
    if wanted > free:
        raise ConfigError(
            f"cache.{key}: a KV cache of {wanted:,} bytes per rank does not fit: {free:,} are free, "
            f"{wanted - free:,} are missing."
        )
    return wanted


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"cache.memory_bytes: must be given, because {meminfo} does not say what is available.")
