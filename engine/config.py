"""The configuration of an engine. What a user writes (YAML, CLI, keyword arguments) is validated by these models.

Every section forbids unknown keys. Values that depend on the model or the machine stay `None` here and are settled
once, in `resolve()`, which says what it chose.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .pooling import PoolingType

Quantization = Literal["int8", "fp8"]


class Section(BaseModel):
    """Base of every configuration section: frozen, strict about names, and documented where it is defined."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """Which model, and how it is held in memory."""

    model: str = Field(
        "smollm2-135m-instruct", description="Embedded model, or a path to a Hugging Face directory or a GGUF file."
    )
    served_model_name: str | None = Field(None, description="Name in the API; the last part of `model` when not given.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, the checkpoint's own type on GPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt + answer in tokens; the model's own limit when not given."
    )
    implementation: Literal["auto", "native", "transformers"] = Field(
        "auto",
        description="Who computes the model. auto: Quire's own decoder where it knows the architecture, else "
        "transformers over Quire's KV cache, which is slower and runs on one rank.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights of the right shapes, for benchmarks."
    )
    quantization: Quantization | None = Field(
        None,
        description="int8 or fp8: weights in 8 bits, with a scale for each row or for each 32 numbers; about a quarter "
        "of float32's memory. Those of a GGUF may keep their packing. Not exact.",
    )
    enforce_eager: bool = Field(
        False,
        description="Launch every kernel of every step, instead of graphs of decode steps (CUDA's, or the CPU's own).",
    )
    pooling: PoolingType | None = Field(
        None, description="What an embedding is made of; what the model's own files say, else last, when not given."
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of one rank; the machine's cores shared by the ranks when not given."
    )
    chat_template: str | None = Field(
        None, description="Chat template instead of the model's own: a file, or one that comes with Quire (hermes)."
    )
    tool_parser: Literal["hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder"] | None = Field(
        None, description="How the model writes tool calls; told by the chat template when not given."
    )
    reasoning_marks: tuple[str, str] | None = Field(
        None, description="What the model's thoughts stand between; told by the chat template when not given."
    )
    seed: int = Field(0, description="Seed from which requests without one of their own draw theirs (offline use).")

    @property
    def name(self) -> str:
        """The model's name in the API. The same on every node: links in the file system are not followed."""
        return self.served_model_name or os.path.basename(os.path.abspath(os.path.expanduser(self.model)))


class ParallelConfig(Section):
    """How one engine is spread over ranks."""

    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share every layer.")
    pipeline_parallel_size: int = Field(
        1, ge=1, description="Stages of consecutive layers, each of `tensor_parallel_size` ranks."
    )
    expert_parallel: bool = Field(
        False, description="Deal a mixture's experts to the ranks whole, instead of a slice of each expert."
    )
    stage_placement: Literal["spread", "pack", "strict_spread"] = Field(
        "spread",
        description="Stages on nodes: on different ones where possible, on as few as possible, or never two on one.",
    )
    startup_timeout_s: float = Field(
        300.0, gt=0, description="Seconds in which all ranks must be placed and loaded, else the engine gives up."
    )
    step_timeout_s: float = Field(
        60.0, gt=0, description="Seconds after which a step that is not done counts as hung, and its ranks as lost."
    )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per block.")
    num_kv_blocks: int | None = Field(None, ge=2, description="Blocks; from `memory_bytes` when not given.")
    memory_bytes: int | None = Field(
        None, ge=1, description="Bytes of KV cache per rank; measured on GPU, a share of free memory on CPU."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU that weights, activations and cache may use."
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="auto: the model's own type. fp8_e4m3: 8 bits, a half or a quarter of the bytes for a little "
        "accuracy, with the checkpoint's scales (k_scale, v_scale) where it has them.",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the blocks of equal prefixes.")


class SchedulerConfig(Section):
    """What one step may hold, and who goes first."""

    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Tokens computed in one step, over all requests. A service on CPU has 512 by default."
    )
    max_num_seqs: int = Field(128, ge=1, description="Requests that run at the same time.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most tokens one request gets in a step; 0: no limit but the budget."
    )
    max_inflight_steps: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Steps given to the workers before the first is back. When not given, 2 on GPU, and on CPU where "
        "decode steps are recorded, else 1; the stages of a pipeline where it is one.",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=7,
        description="Tokens of a request that are guessed, from what stood behind its last ones before, and checked in "
        "one step; the tokens stay the same. 0: none. When not given, up to 4 in float32 on CPU, for up to 3 "
        "requests, where they pay by what steps have taken and how guesses have fared, else 0.",
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="fcfs: by arrival. priority: lower number first, then arrival."
    )
    max_queued_requests: int | None = Field(
        1024, ge=1, description="Waiting requests beyond which new ones are refused (503)."
    )
    max_queued_tokens: int | None = Field(
        None, ge=1, description="Tokens of waiting requests beyond which new ones are refused (503)."
    )


class GrammarConfig(Section):
    """What a grammar (structured output) may cost."""

    max_source_bytes: int = Field(
        262_144, ge=1, description="Size of a schema, expression or grammar, in bytes of its source in UTF-8."
    )
    max_schema_depth: int = Field(64, ge=1, description="How deep a JSON schema may be nested.")
    max_grammar_size: int = Field(500_000, ge=1, description="Symbols of a compiled grammar, its references followed.")
    max_lexer_fuel: int = Field(
        1_000_000, ge=1, description="Effort for its expressions when it is compiled; about 50,000 are a millisecond."
    )
    max_search_steps: int = Field(
        10_000, ge=1, description="Effort to find its shortest answer; about 100 are a millisecond."
    )


class EngineConfig(Section):
    """Everything that one engine needs to know."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    grammar: GrammarConfig = GrammarConfig()

    @model_validator(mode="before")
    @classmethod
    def _model_by_name(cls, data: object) -> object:
        """`model: NAME` is short for `model: {model: NAME}`."""
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            return {**data, "model": {"model": data["model"]}}
        return data
