"""Which numbers of ranks can share a model. Imports no torch: asked before any rank is started."""

from __future__ import annotations

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo

from .families import FAMILIES, family_of
from .spec import DecoderSpec, MoESpec


def check_ranks(config: EngineConfig, info: ModelInfo) -> None:
    """Raise `ConfigError` when the ranks of an engine cannot share its model."""
    parallel = config.parallel
    if info.implementation.kind == "transformers":
        if parallel.world_size > 1 or parallel.expert_parallel:
            raise ConfigError(
                f"parallel: {parallel.world_size} ranks cannot share {info.hf_config['architectures'][0]}, which is "
                f"computed by transformers, on one rank only. Families that can be shared: {', '.join(FAMILIES)}."
            )
        return
    _, family = family_of(info.hf_config)
    check_sizes(
        family.decoder_spec(info.hf_config, info.max_model_len),
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        expert_parallel=parallel.expert_parallel,
    )


def check_sizes(spec: DecoderSpec, tensor_size: int, num_stages: int, *, expert_parallel: bool) -> None:
    """Raise `ConfigError` when a rank would be left with nothing: no layer, attention head, MLP column or expert.

    Parts may be unequal, so every smaller size works.
    """
    _refuse("parallel.pipeline_parallel_size", f"{num_stages} stages", num_stages, "layers", len(spec.layers))
    ranks, key = f"{tensor_size} ranks", "parallel.tensor_parallel_size"
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    if expert_parallel and not experts:
        raise ConfigError("parallel.expert_parallel: the model has no experts; leave it out.")
    num_heads = min(layer.attention.num_heads for layer in spec.layers)
    _refuse(key, ranks, tensor_size, "attention heads", num_heads)
    if expert_parallel:
        num_experts = min(mlp.num_experts for mlp in experts)
        _refuse("parallel.expert_parallel", ranks, tensor_size, "experts", num_experts, of="tensor_parallel_size ")
    sliced = [layer.mlp for layer in spec.layers if not (expert_parallel and isinstance(layer.mlp, MoESpec))]
    if sliced:
        num_columns = min(mlp.intermediate_size for mlp in sliced)
        _refuse(key, ranks, tensor_size, "columns of an MLP", num_columns)


def _refuse(key: str, sharers: str, size: int, things: str, limit: int, of: str = "") -> None:
    if size > limit:
        raise ConfigError(f"{key}: {sharers} cannot share {limit} {things}; {of}sizes 1 to {limit} work.")
