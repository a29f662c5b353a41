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
    served_model_name: str | None = Field(
        None, description="Name in the API. When not given, the last part of `model`."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, the checkpoint's own type on GPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where torch sees a GPU; in a service, where there is one for each rank."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt + answer in tokens. When not given, the model's own limit."
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
        description="int8 or fp8: weights in 8 bits, with a scale per row or per block of 32; about a quarter of "
        "float32's memory. Packed weights of a GGUF may stay packed. Tokens are no longer exactly the reference's.",
    )
    enforce_eager: bool = Field(
        False,
        description="Launch every kernel of every step; no graphs of decode steps (CUDA graphs, or recorded "
        "steps on CPU).",
    )
    pooling: PoolingType | None = Field(
        None, description="How an embedding is pooled. When not given, as the model's own files say, else last."
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of one rank (on a GPU, to load weights). When not given, the cores of a host are "
        "divided among its ranks.",
    )
    chat_template: str | None = Field(
        None, description="Chat template instead of the model's own: a file, or one that comes with Quire (hermes)."
    )
    tool_parser: Literal["hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder", "harmony"] | None = Field(
        None, description="How the model writes tool calls. When not given, the chat template tells."
    )
    reasoning_marks: tuple[str, str] | None = Field(
        None, description="Start and end mark of the model's reasoning. When not given, the chat template tells."
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
        False, description="Give each rank whole experts of a mixture, instead of a slice of every expert."
    )
    stage_placement: Literal["spread", "pack", "strict_spread"] = Field(
        "spread",
        description="Pipeline stages on different nodes where possible, on as few as possible, or never two on "
        "one node.",
    )
    startup_timeout_s: float = Field(
        300.0, gt=0, description="Seconds until all ranks must be placed and loaded, else the engine gives up."
    )
    step_timeout_s: float = Field(
        60.0, gt=0, description="Seconds after which an unfinished step counts as hung: its ranks are rebuilt."
    )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per block.")
    num_kv_blocks: int | None = Field(
        None, ge=2, description="Size of the KV cache in blocks. When not given, as many as fit its memory."
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache per rank. When not given, measured on GPU, a share of free memory on CPU.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory for weights, activations and KV cache together."
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="auto: the model's dtype. fp8_e4m3: a half or a quarter of the bytes, a little less accurate; "
        "scales (k_scale, v_scale) come from the checkpoint where it has them.",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse KV cache blocks of equal prefixes.")


class SchedulerConfig(Section):
    """What one step may hold, and who goes first."""

    max_num_batched_tokens: int = Field(
        2048,
        ge=1,
        description="Most tokens computed in one step, over all requests. In a service on CPU 512 when not given.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Most requests that run at the same time.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most prompt tokens of one request in one step. 0: no limit but `max_num_batched_tokens`."
    )
    max_inflight_steps: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Steps handed to the workers before the first has returned. When not given: 2 on GPU and on CPU "
        "where decode steps are recorded, else 1; with a pipeline, the number of its stages.",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=7,
        description="Speculative decoding: most tokens guessed per request and step, from its own text. Answers stay "
        "the same. 0: off. When not given: up to 4 in float32 on CPU, for up to 3 requests, while that pays; else 0.",
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="fcfs: by arrival. priority: smaller numbers first, then arrival."
    )
    max_queued_requests: int | None = Field(
        1024, ge=1, description="Most waiting requests; more are refused with 503. null: no limit."
    )
    max_queued_tokens: int | None = Field(
        None, ge=1, description="Most tokens of waiting requests; more are refused with 503. null: no limit."
    )


class GrammarConfig(Section):
    """What a grammar (structured output) may cost."""

    max_source_bytes: int = Field(
        262_144, ge=1, description="Longest source of a schema, expression or grammar, in bytes of UTF-8."
    )
    max_schema_depth: int = Field(64, ge=1, description="Deepest nesting of a JSON schema.")
    max_grammar_size: int = Field(
        500_000, ge=1, description="Most symbols of a compiled grammar, with its references followed."
    )
    max_lexer_fuel: int = Field(
        1_000_000, ge=1, description="Most work to compile its expressions; 50,000 is about a millisecond."
    )
    max_search_steps: int = Field(
        10_000, ge=1, description="Most work to find its shortest answer; 100 is about a millisecond."
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
