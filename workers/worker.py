"""One rank of a model: its life from loading to steps. Knows no Ray."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec, group_layers
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import GrammarMasks, IntArray, ModelRunnerOutput, NewRow, SchedulerOutput
from quire.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from quire.engine.speculation import DEFAULT_NUM_TOKENS, MAX_STEP_DRAFTS, num_speculative_tokens
from quire.kernels import fp8
from quire.kernels.dispatch import LARGEST_GPU_HEAD
from quire.kernels.ops import AttentionMetadata

from .cgroup import usable_cores
from .decode_graphs import CudaGraphBackend
from .host_memory import gather_weights
from .kv_cache import allocate_kv_cache
from .launched_step import LaunchedStep
from .layers.attention import KVScales, LayerCache
from .layers.parameter import num_bytes
from .loader.kv_scales import kv_scales
from .loader.load import load_dummy
from .malloc import keep_freed_memory
from .memory_profile import check_weights_fit, free_bytes, kv_cache_bytes
from .model_runner import ModelRunner, StepLimits
from .models.model import Blueprint, Model, slice_tokens
from .page_filler import PageFiller
from .parallel import ParallelContext
from .quantization import blueprint_for

logger = logging.getLogger(__name__)

_WARM_UP_ROWS = 32  # requests with a token each are more rows than any kernel on CPU for few rows takes
_LONG_CONTEXT = 2048  # keys of a decode: a GPU cuts them in more parts than one program of attention takes
_DRIVER = Path("/proc/driver/nvidia/version")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Call `load_model`, `initialize_kv_cache`, then `execute_model` once per step, one call at a time.

    `initialize_kv_cache` may be called again: all rows are then empty. `device_index` chooses among the GPUs that this
    process sees.
    """

    def __init__(
        self, config: EngineConfig, info: ModelInfo, parallel: ParallelContext, *, device_index: int = 0
    ) -> None:
        self._config = config
        self._info = info
        self._parallel = parallel
        self.device = resolve_device(config.model.device, device_index)
        self.dtype = resolve_dtype(config.model.dtype, self.device, info)
        self.cache_dtype = resolve_cache_dtype(config, self.dtype)
        self._kv_scales: list[KVScales] = []
        self._model: Model | None = None
        self._runner: ModelRunner | None = None
        self._filler: PageFiller | None = None

    def load_model(self) -> None:
        """Build and fill this rank's share of the model. Raises `ConfigError` when it cannot work or does not fit."""
        threads_before = torch.get_num_threads()
        # Explicit, because Ray sets OMP_NUM_THREADS to 1 in actors.
        torch.set_num_threads(self._config.model.num_threads or default_num_threads(len(self._parallel.host_ranks)))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.empty_cache()  # what an earlier engine of this process left
            # What a split product adds up in two bytes depends on how it is split.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        free = free_bytes(self.device)  # at once: the other ranks of this host load, too
        blueprint = blueprint_for(self._config.model, self._info, self.device)
        with building(torch.device("meta"), self.dtype):
            model = blueprint.build(self._parallel)
            weight_bytes = num_bytes(model.parameters())
            beside = [num_bytes(blueprint.build(each).parameters()) for each in self._beside()]
        check_heads(model.kv_cache_specs(self._config.cache.block_size, self.cache_dtype), self.device)
        check_weights_fit([weight_bytes, *beside], free, self.device, self._info.name)
        with self._compiled_meanwhile() as is_elsewhere:
            self._model = self._loaded(blueprint)
            if is_elsewhere and self._parallel.grid.world_size == 1 and self._model.is_capturable:
                self._compute_nothing()
        logger.info(
            "rank %d of %d: %s, %s, %s, %d bytes of weights as %s on %s, %d threads",
            self._parallel.rank,
            self._parallel.grid.world_size,
            self._info.name,
            blueprint.architecture,
            blueprint.implementation,
            weight_bytes,
            self.dtype,
            self.device,
            torch.get_num_threads(),
        )
        if self.device.type == "cuda":
            torch.set_num_threads(threads_before)  # only reading and quantizing has work for more

    def _beside(self) -> list[ParallelContext]:
        """The places of the other ranks that load into the same memory."""
        if self.device.type != "cpu":
            return []
        own = self._parallel
        return [ParallelContext(rank, own.grid) for rank in own.host_ranks if rank != own.rank]

    def _compiled_meanwhile(self) -> AbstractContextManager[bool]:
        if self.device.type != "cpu":
            return nullcontext(False)
        from quire.kernels.cpu.ahead import compiled_meanwhile

        return compiled_meanwhile(self.dtype, self.cache_dtype)

    def _loaded(self, blueprint: Blueprint) -> Model:
        with building(self.device, self.dtype):
            model = blueprint.build(self._parallel)
        if self.device.type == "cpu":
            gather_weights(model.parameters())
        if self._config.model.load_format == "dummy":
            load_dummy(model)
        else:
            blueprint.load(model, self._info, progress=self._parallel.rank == 0)
        self._kv_scales = kv_scales(self._config, self._info, len(model.kv_cache_specs(1, self.cache_dtype)))
        if self.device.type == "cpu":
            keep_freed_memory()
        return model.to(self.device).eval()  # the weights are there already; this moves the buffers

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """What each layer of the whole model caches on ranks with this tensor rank. Rank 0's are the largest."""
        return self.model.kv_cache_specs(self._config.cache.block_size, self.cache_dtype)

    def available_kv_cache_bytes(self) -> int:
        """Bytes that this rank can give to its KV cache. All ranks are asked at once.

        On GPU this runs the largest step, to measure it, and smaller ones; on CPU two small ones, so that no request
        waits until what it needs is compiled.

        Raises `ConfigError` when a size that the user asked for is not there.
        """
        specs = self.kv_cache_specs()
        if self.device.type == "cuda":
            activation_bytes = self._measure_activations()
        else:
            activation_bytes = 0
            self._warm_up()
        return kv_cache_bytes(
            self._config,
            specs,
            self._info.max_model_len,
            self.device,
            activation_bytes,
            stage=self._parallel.stage,
            host_ranks=self._parallel.host_ranks,
        )

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache, with this rank's own number of KV heads, and an empty request table. Capture graphs."""
        caches = self._make_runner(config)
        if self.device.type == "cpu":
            halves = [half for cache in caches for half in (cache.key, cache.value)]
            self._filler = PageFiller(halves, free=partial(free_bytes, self.device))
        if self._uses_graphs:
            self._capture_graphs()

    def _warm_up(self) -> None:
        """Many prompts, whose tokens are drawn of those that a grammar allows, and a greedy decode, in a cache of their
        own."""
        limits = self._config.scheduler
        num_tokens = min(2, self._info.max_model_len, limits.max_num_batched_tokens)
        num_rows = min(_WARM_UP_ROWS, limits.max_num_seqs, limits.max_num_batched_tokens // num_tokens)
        step, config = self._step_of(np.full(num_rows, num_tokens, np.int32))
        single, _ = self._step_of(np.array([1], np.int32), is_greedy=True)
        self._make_runner(config)
        for each in (step, single):
            self.execute_model(each)

    @torch.inference_mode()
    def _compute_nothing(self) -> None:
        """Many tokens, and one, that belong to nobody: all that a forward calls but attention is compiled by them."""
        _, config = self._step_of(np.array([1], np.int32))
        caches = self._allocate(config)
        for num_tokens in (2 * _WARM_UP_ROWS, 1):
            tokens = torch.zeros(num_tokens, dtype=torch.int64)
            nobody = np.zeros(2, np.int32)  # a request of no tokens, which is padding
            metadata = AttentionMetadata(
                query_start_loc=torch.from_numpy(nobody),
                seq_lens=torch.from_numpy(nobody[1:]),
                block_table=torch.zeros(1, 1, dtype=torch.int32),
                slot_mapping=torch.full_like(tokens, -1),
                query_start_loc_np=nobody,
                seq_lens_np=nobody[1:],
            )
            states = self.model(tokens, tokens, caches, [metadata] * len(self.model.own_layers))
            hidden = self.model.last_hidden_state(slice_tokens(states, 0, _WARM_UP_ROWS))
            self.model.logits(hidden)
            self.model.likeliest(hidden)

    def _allocate(self, config: KVCacheConfig) -> list[LayerCache]:
        return allocate_kv_cache(
            config, self.kv_cache_specs(), self._kv_scales, self.model.own_layers, self.cache_dtype, self.device
        )

    def _make_runner(self, config: KVCacheConfig) -> list[LayerCache]:
        self._drop_runner()  # frees the old cache first
        caches = self._allocate(config)
        limits = self._config.scheduler
        self._runner = ModelRunner(
            self.model,
            caches,
            config,
            StepLimits(
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                self._info.max_model_len,
                limits.max_inflight_steps or self.preferred_inflight_steps,
            ),
            self.device,
        )
        return caches

    def close(self) -> None:
        """Free the model and the cache: on a GPU, for every process and not only for torch in this one."""
        self._drop_runner()
        self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.drop()
        self._runner = self._filler = None

    @property
    def preferred_inflight_steps(self) -> int:
        """One for each stage, so that all are at work. Two where a step is computed while the host plans the next: on a
        GPU, which then never waits for it, and as a graph on CPU."""
        is_computed_meanwhile = self.device.type == "cuda" or (self._uses_graphs and _has_helpers())
        return max(self._parallel.grid.num_stages, 2 if is_computed_meanwhile else 1)

    @property
    def preferred_speculative_tokens(self) -> int:
        """Some in float32 on CPU: there a row's bits do not depend on the rows beside it. Whether they pay, says the
        engine's `DraftGain`."""
        is_exact = self.device.type == "cpu" and self.dtype == torch.float32 and self._config.model.quantization is None
        return DEFAULT_NUM_TOKENS if is_exact else 0

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Start one step, without waiting for it where several may be in flight. With several ranks, all must be given
        the same steps in the same order."""
        busy = self._filler or nullcontext()
        with busy:
            return self.runner.launch(step, busy)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Launch one step and wait for its result."""
        return self.launch(step).result()

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("initialize_kv_cache was not called")
        return self._runner

    @property
    def model(self) -> Model:
        if self._model is None:
            raise RuntimeError("load_model was not called")
        return self._model

    @property
    def _uses_graphs(self) -> bool:
        """Unless the user or the model objects. What stages send to each other is no part of a graph, nor, on CPU, what
        the ranks of one do."""
        grid = self._parallel.grid
        fits = grid.num_stages == 1 if self.device.type == "cuda" else grid.world_size == 1
        return fits and not self._config.model.enforce_eager and self.model.is_capturable

    def _capture_graphs(self) -> None:
        if self.device.type == "cpu":
            from .cpu_graphs import MOST_DECODES, CpuGraphBackend

            self.runner.record_graphs(CpuGraphBackend(), MOST_DECODES)
            return
        self.runner.capture_graphs(CudaGraphBackend(self.device), progress=self._parallel.rank == 0)

    def _measure_activations(self) -> int:
        """Peak bytes of the largest step beside weights and cache, on a GPU, those of the graphs, and the most that
        sums of attention take: how many there are depends on how many requests of a step have how long contexts."""
        from quire.kernels.triton.attention import MOST_SUMS

        step, config = self._largest_step()
        long_decode, enough_for_it = self._long_decode()
        self._make_runner(max(config, enough_for_it, key=lambda each: each.num_blocks))
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.execute_model(step)
        peak = torch.cuda.max_memory_allocated(self.device) - before + MOST_SUMS
        sent_bytes = self._parallel.most_sent_bytes
        self._run_prompts_of_all_sizes()
        self.execute_model(long_decode)
        graph_bytes = self._measure_graphs() if self._uses_graphs else 0
        self._runner = None
        torch.cuda.empty_cache()
        logger.info(
            "largest step: %d bytes of activations, %d on their way to the next stage, %d of graphs, %d bytes free",
            peak,
            sent_bytes,
            graph_bytes,
            free_bytes(self.device),
        )
        return peak + sent_bytes + graph_bytes + self._draft_bytes()

    def _run_prompts_of_all_sizes(self) -> None:
        """One prompt at a time, of 1, 2, 4 ... tokens up to the largest step: tiles, and so what is compiled, depend on
        the rows of a step by powers of two, and no request should wait for a compiler."""
        most = min(self._config.scheduler.max_num_batched_tokens, self._info.max_model_len)
        for num_tokens in [*(1 << i for i in range((most - 1).bit_length())), most]:
            step, _ = self._step_of(np.array([num_tokens], np.int32))
            self.execute_model(step)

    def _long_decode(self) -> tuple[SchedulerOutput, KVCacheConfig]:
        """A decode with a long context, and the cache it needs: attention adds up parts there, by a kernel of its own,
        which is first compiled while serving where no graph is captured."""
        length = min(_LONG_CONTEXT, self._info.max_model_len)
        step, config = self._step_of(np.array([length], np.int32))
        one = np.ones(1, np.int32)
        return msgspec.structs.replace(step, num_scheduled_tokens=one, num_computed_tokens=length - one), config

    def _draft_bytes(self) -> int:
        """What drafts add to the largest step, which has none: logits, and three copies where they are drawn."""
        has_drafts = num_speculative_tokens(self._config, self.preferred_speculative_tokens) > 0
        return MAX_STEP_DRAFTS * self._info.vocab_size * 4 * 4 if has_drafts else 0

    def _measure_graphs(self) -> int:
        """What all graphs take together: their pool, and what the driver keeps of each."""
        torch.cuda.empty_cache()
        before = free_bytes(self.device)
        self._capture_graphs()
        torch.cuda.empty_cache()
        return max(0, before - free_bytes(self.device))

    def _largest_step(self) -> tuple[SchedulerOutput, KVCacheConfig]:
        """A step with as many tokens and rows as the scheduler may give, and the cache it needs. All but one want
        logprobs: what some want is copied before it is sorted."""
        limits = self._config.scheduler
        num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        lengths = np.full(num_rows, limits.max_num_batched_tokens // num_rows, np.int32)
        lengths[: limits.max_num_batched_tokens % num_rows] += 1
        return self._step_of(np.minimum(lengths, self._info.max_model_len), num_with_logprobs=max(1, num_rows - 1))

    def _step_of(
        self, lengths: IntArray, *, is_greedy: bool = False, num_with_logprobs: int = 0
    ) -> tuple[SchedulerOutput, KVCacheConfig]:
        """A step with prompts of some lengths, and the cache it needs. They take the likeliest tokens, or they have a
        grammar and draw theirs; the first ones want logprobs."""
        num_rows, block_size = len(lengths), self._config.cache.block_size
        groups = group_layers(self.kv_cache_specs(), self._parallel.grid.num_stages)
        new_rows, next_block = [], 1
        for row, length in enumerate(lengths.tolist()):
            num_blocks = -(-length // block_size)
            block_ids = list(range(next_block, next_block + num_blocks))
            next_block += num_blocks
            new_rows.append(
                NewRow(
                    row=row,
                    request_id=str(row),
                    token_ids=[0] * length,
                    num_prompt_tokens=length,
                    sampling_params=SamplingParams(
                        temperature=0.0 if is_greedy else 1.0,
                        top_p=0.9,
                        logprobs=MAX_LOGPROBS if row < num_with_logprobs else None,
                    ),
                    seed=0,
                    choice_index=0,
                    eos_token_ids=(),
                    block_ids=tuple(block_ids for _ in groups),
                )
            )
        rows, masks = np.arange(num_rows, dtype=np.int32), (num_rows, -(-self._info.vocab_size // 32))
        step = SchedulerOutput(
            step_id=0,
            rows=rows,
            num_scheduled_tokens=lengths,
            num_computed_tokens=np.zeros_like(rows),
            new_rows=new_rows,
            grammar=None if is_greedy else GrammarMasks(indices=rows, allowed=np.full(masks, -1, np.int32)),
        )
        return step, KVCacheConfig(next_block, block_size, groups)


def _has_helpers() -> bool:
    """Of the thread that computes, on CPU."""
    from quire.kernels.cpu.threads import has_helpers

    return has_helpers(torch.get_num_threads())


def check_heads(specs: Sequence[KVCacheSpec], device: torch.device) -> None:
    """Raises `ConfigError` where the kernels of this device do not take heads as large as a model's."""
    largest = max((spec.head_dim for spec in specs), default=0)
    if device.type == "cuda" and largest > LARGEST_GPU_HEAD:
        raise ConfigError(
            f"model.model: attention on a GPU takes heads of up to {LARGEST_GPU_HEAD} numbers, and this model's have "
            f"{largest}; model.device: cpu computes them."
        )


def resolve_device(device: str, index: int = 0) -> torch.device:
    """auto: cuda where torch sees a GPU. Raises `ConfigError` when a GPU is asked for and there is none."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError(f"model.device: 'cuda' was given, but torch sees no GPU: {_what_must_fit()}.")
    return torch.device("cuda", index) if has_cuda and device != "cpu" else torch.device("cpu")


def _what_must_fit() -> str:
    """The CUDA that torch is built for, and the driver, which may be too old for it."""
    built = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)*", _DRIVER.read_text()) if _DRIVER.exists() else None
    return f"it is {built}, and {f'the NVIDIA driver is {found[0]}' if found else 'no NVIDIA driver was found'}"


def resolve_dtype(dtype: str, device: torch.device, info: ModelInfo) -> torch.dtype:
    """auto: float32 on CPU (bfloat16 is slow there without its instructions), the checkpoint's own type on GPU."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    stored = info.hf_config.get("dtype") or info.hf_config.get("torch_dtype") or "bfloat16"
    return _DTYPES.get(stored, torch.bfloat16)


def resolve_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return fp8.DTYPE if config.cache.kv_cache_dtype == "fp8_e4m3" else dtype


def default_num_threads(num_ranks: int) -> int:
    """The cores that this process may use, shared by the ranks of its host."""
    return max(1, usable_cores() // num_ranks)


@contextmanager
def building(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are of `dtype` on `device`. The default type is torch's own global, so it is put back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
