"""`quire.LLM`: model, executor, engine core and tokenizer put together for offline use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from quire.cluster.assembly import start_core
from quire.engine.beam_search import Beam, BeamSearchParams
from quire.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from quire.engine.input_processor import InputProcessor
from quire.engine.llm import Message, OfflineEngine, Prompt
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EmbeddingOutput, RequestOutput, SchedulerStats
from quire.engine.pooling import PoolingParams, PoolingType
from quire.engine.sampling_params import SamplingParams
from quire.engine.tokenizer import load_tokenizer


class LLM:
    """A model in this process (one rank) or over Ray worker actors (more), answering batches of prompts.

        llm = LLM(model="smollm2-135m-instruct")
        outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16))
        print(outputs[0].outputs[0].text)

    `model` is an embedded model's name, a Hugging Face directory or a GGUF file. `seed` is where requests without a
    seed of their own draw theirs, so a program gives the same answers every time. Raises `ConfigError` if it cannot
    work.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        implementation: Literal["auto", "native", "transformers"] = "auto",
        quantization: Literal["int8", "fp8"] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel: bool = False,
        max_model_len: int | None = None,
        pooling: PoolingType | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        long_prefill_token_threshold: int = 0,
        max_inflight_steps: int | None = None,
        num_speculative_tokens: int | None = None,
        kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto",
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        num_threads: int | None = None,
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=model,
                dtype=dtype,
                device=device,
                load_format=load_format,
                implementation=implementation,
                quantization=quantization,
                max_model_len=max_model_len,
                pooling=pooling,
                enforce_eager=enforce_eager,
                num_threads=num_threads,
                seed=seed,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=tensor_parallel_size,
                pipeline_parallel_size=pipeline_parallel_size,
                expert_parallel=expert_parallel,
            ),
            cache=CacheConfig(
                block_size=block_size,
                num_kv_blocks=num_kv_blocks,
                memory_bytes=kv_cache_memory_bytes,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_dtype=kv_cache_dtype,
                enable_prefix_caching=enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                long_prefill_token_threshold=long_prefill_token_threshold,
                max_inflight_steps=max_inflight_steps,
                num_speculative_tokens=num_speculative_tokens,
                max_queued_requests=None,  # the caller waits for all of them anyway
            ),
        )
        info = load_model_info(config.model)
        tokenizer = load_tokenizer(info)
        core = start_core(config, info)
        input_processor = InputProcessor(info, tokenizer, seed=seed)
        input_processor.max_model_len = core.max_model_len
        self._engine = OfflineEngine(core, input_processor, tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """See `OfflineEngine.generate`."""
        return self._engine.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """See `OfflineEngine.chat`."""
        return self._engine.chat(
            messages,
            sampling_params,
            use_tqdm=use_tqdm,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
        )

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """See `OfflineEngine.embed`."""
        return self._engine.embed(prompts, pooling, use_tqdm=use_tqdm)

    def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
        """See `OfflineEngine.beam_search`."""
        return self._engine.beam_search(prompts, params)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, or one conversation (a list of messages), piece by piece."""
        if isinstance(prompt, str):
            return self._engine.stream(prompt, sampling_params)
        if isinstance(prompt, dict):
            return self._engine.stream(prompt, sampling_params)
        return self._engine.stream(self._engine.render_chat(prompt), sampling_params)

    def get_tokenizer(self) -> Any:
        """The model's `transformers` tokenizer."""
        return self._engine.tokenizer

    def stats(self) -> SchedulerStats:
        return self._engine.core.stats()

    def shutdown(self) -> None:
        """Free the model and the cache, and end the workers. Harmless when called twice."""
        self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ did not get that far
            self.shutdown()
