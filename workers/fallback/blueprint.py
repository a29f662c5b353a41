"""How a model is built by `transformers`, probed and filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.engine.errors import ConfigError
from quire.engine.model_source import Implementation, ModelInfo

from ..parallel import ParallelContext
from .interface import PAGED, PROBING
from .model import FallbackModel
from .probe import AttentionCall, probe, refusal
from .self_check import check_tokens_apart
from .weights import check_fallback_weights, load_fallback_weights


@dataclass(frozen=True, slots=True)
class FallbackBlueprint:
    """A causal language model of `transformers` with its attention calls known."""

    architecture: str
    implementation: Implementation
    hf_config: dict[str, Any]
    max_model_len: int
    calls: tuple[AttentionCall, ...]

    @classmethod
    def of(cls, info: ModelInfo) -> FallbackBlueprint:
        """Raises `ConfigError` when the model cannot work over a paged cache."""
        (architecture,) = info.hf_config["architectures"][:1]
        with torch.device("meta"):
            causal_lm = _build(info.hf_config, info.max_model_len, PROBING)
        if type(causal_lm).__name__ != architecture:
            raise refusal(architecture, f"another class in transformers, {type(causal_lm).__name__}")
        calls = probe(causal_lm, architecture, info.max_model_len)
        return cls(architecture, info.implementation, info.hf_config, info.max_model_len, tuple(calls))

    def build(self, parallel: ParallelContext) -> FallbackModel:
        if parallel.grid.world_size != 1:
            raise RuntimeError(f"{parallel.grid.world_size} ranks: `check_ranks` was not asked")
        return FallbackModel(_build(self.hf_config, self.max_model_len, PAGED), self.calls)

    def load(self, model: FallbackModel, info: ModelInfo, *, progress: bool) -> None:
        load_fallback_weights(model.causal_lm, info, progress=progress)
        check_tokens_apart(model, self.architecture)

    def check(self, model: FallbackModel, info: ModelInfo) -> None:
        check_fallback_weights(model.causal_lm, info)


def _build(hf_config: dict[str, Any], max_model_len: int, attention: str) -> Any:
    """The model with weights of torch's default type on torch's default device, not filled; buffers are."""
    # How experts are computed is no property of a checkpoint, though it is saved with it; and how weights are stored is
    # the loader's.
    settings = {key: hf_config[key] for key in hf_config.keys() - {"experts_implementation", "quantization_config"}}
    config = CONFIG_MAPPING[hf_config["model_type"]].from_dict(settings)
    dtype = torch.get_default_dtype()
    if attention == PROBING:
        config._experts_implementation = PROBING
    elif torch.get_default_device().type == "cpu":
        config._experts_implementation = "eager"  # grouped_mm, the default, takes no sizes that are not aligned there
    try:
        with no_init_weights():
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, attn_implementation=attention, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        if attention in str(error):
            raise refusal(hf_config["architectures"][0], "attention classes of its own") from error
        problem = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"model: transformers cannot build {hf_config['architectures'][0]}: {problem}") from error
    model.tie_weights()
    _fix_rotary(model, max_model_len)
    # Weights that lose too much in a short type are kept in float32, as when transformers loads them.
    for pattern in model._get_dtype_plan(dtype):
        for name, parameter in model.named_parameters():
            if pattern in name:
                parameter.data = parameter.data.float()
    return model.requires_grad_(False).eval()


def _fix_rotary(causal_lm: Any, max_model_len: int) -> None:
    """Rotary scaling that depends on the length is settled by `max_model_len`, as in our own families: transformers
    would look at the longest request of each batch."""
    for module in causal_lm.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(each == "longrope" or "dynamic" in each for each in kind.values()):
            raise ConfigError("model: rotary scaling by length that differs between kinds of layers is not supported.")
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, module.inv_freq.device, seq_len=max_model_len)
            module.inv_freq, module.attention_scaling = inv_freq, scaling
            module.rope_type = "default"  # or its forward would compute it again
