"""How long a step of the engine takes, with dummy weights in the shapes of known models: nothing is downloaded.

A decode step reads every weight, and the keys and values of every request: its limit is their bytes at the speed of a
copy. A prefill's is the products with the weights at the speed of a matrix product. That of a mixed load is the sum:
all prompts as one prefill, then as many decode steps as the longest answer has tokens. A profile says which kernels a
step's time goes to: the time of each is from its launch to its end, so that those of kernels that are launched before
the last one is done add up to more than the step's.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from quire.workers.kernel_bench.measure import Limits
from quire.workers.kernel_bench.work import Work, attention_work

# As published with the models.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
    },
}  # fmt: skip


_MOST_NAMED = 24  # kernels of a profile, when it is printed


@dataclass(frozen=True, slots=True)
class Speed:
    """`limit_ms` is what the step would take at the limits measured beside it."""

    work: str
    ms: float
    tokens_per_s: float
    limit_ms: float

    @property
    def share(self) -> float:
        return self.limit_ms / self.ms

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}

    def __str__(self) -> str:
        rates = f"{self.ms:>9.2f} ms {self.tokens_per_s:>10,.0f} tok/s"
        return f"{self.work:<46} {rates}  {self.share:>4.0%} of the limit"


@dataclass(frozen=True, slots=True)
class Profile:
    """Of a step: the name of each kernel, how often it is called, and its microseconds in all; most of these first."""

    work: str
    kernels: list[tuple[str, float, float]]

    def figures(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        named, others = self.kernels[:_MOST_NAMED], self.kernels[_MOST_NAMED:]
        rest = ("others", sum(calls for _, calls, _ in others), sum(us for *_, us in others))
        lines = [f"    {name[:72]:<72} {calls:>8.1f} {us:>10.1f} us" for name, calls, us in [*named, rest]]
        return "\n".join([f"{self.work:<46} {sum(us for *_, us in self.kernels) / 1e3:>9.2f} ms in all", *lines])


@contextmanager
def dummy_model(config: dict[str, Any]) -> Iterator[Path]:
    """A directory with a configuration and a tokenizer of three words, which is all that dummy weights need."""
    from tokenizers import Tokenizer, models

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(config))
        Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")).save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        yield path


def matrix_elements(config: dict[str, Any]) -> int:
    """Elements that a decode step multiplies with: the layers' matrices and the head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * heads * config["head_dim"] + 3 * hidden * config["intermediate_size"]
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Requests that come at once, each with a prompt and an answer of some length, drawn at a temperature."""

    num_requests: int
    lengths: range
    temperature: float = 0.6


MIXED = Mixed(256, range(100, 1025))  # the recipe of nano-vllm's README


def measure(
    config: dict[str, Any],
    limits: Limits,
    *,
    batches: Sequence[int] = (),
    context: int = 0,
    prefills: Sequence[int] = (),
    mixed: Mixed | None = None,
    profiled: Sequence[int] = (),
    profiled_prefills: Sequence[int] = (),
    num_steps: int = 64,
    element_size: int = 2,
    **engine: Any,
) -> Iterator[Speed | Profile]:
    """Decode steps of some batches at a context, whole prefills, a mixed load, and profiles of the former two.

    `engine`: options of `quire.LLM`.
    """
    from quire import LLM

    mixed_length = 2 * mixed.lengths[-1] if mixed is not None else 0
    longest = max(context + num_steps + 2, *prefills, *profiled_prefills, mixed_length, 1) + 2
    with dummy_model(config) as path:
        llm = LLM(
            str(path),
            load_format="dummy",
            max_model_len=longest,
            max_num_seqs=max(*batches, *profiled, mixed.num_requests if mixed is not None else 0, 1),
            **engine,
        )
        try:
            for batch in batches:
                yield _decode(llm, config, limits, batch, context, num_steps, element_size)
            for num_tokens in prefills:
                yield _prefill(llm, config, limits, num_tokens)
            if mixed is not None:
                yield _mixed(llm, config, limits, mixed, element_size)
            for batch in profiled:
                yield _decode_profile(llm, config, batch, context, num_steps)
            for num_tokens in profiled_prefills:
                prompts = _prompts(config, 1, num_tokens, seed=num_tokens + 2)
                yield _profile(f"kernels of prefill {num_tokens}", 1, partial(_seconds, llm, prompts, 1))
        finally:
            llm.shutdown()


def _decode(
    llm: Any, config: dict[str, Any], limits: Limits, batch: int, context: int, num_steps: int, element_size: int
) -> Speed:
    """The difference between many tokens and one leaves the steps alone: prompts, each another, are in the prefix cache
    by then, so that all requests begin together."""
    prompts = _prompts(config, batch, context, seed=batch)
    _seconds(llm, prompts, 2)  # compiles, captures graphs and fills the cache
    short, long = (min(_seconds(llm, prompts, 1 + steps) for _ in range(3)) for steps in (0, num_steps))
    step_s = (long - short) / num_steps
    limit_s = _decode_limit_s(config, limits, [(1, context + num_steps // 2)] * batch, 1, element_size)
    return Speed(f"decode, batch {batch}, context {context}", step_s * 1e3, batch / step_s, limit_s * 1e3)


def _prefill(llm: Any, config: dict[str, Any], limits: Limits, num_tokens: int) -> Speed:
    first, second = (_prompts(config, 1, num_tokens, seed=num_tokens + i) for i in range(2))
    _seconds(llm, first, 1)
    seconds = _seconds(llm, second, 1)
    limit_s = _prefill_limit_s(config, limits, [num_tokens])
    return Speed(f"prefill {num_tokens}", seconds * 1e3, num_tokens / seconds, limit_s * 1e3)


def _mixed(llm: Any, config: dict[str, Any], limits: Limits, mixed: Mixed, element_size: int) -> Speed:
    from quire import SamplingParams

    generator = random.Random(0)
    lengths = [(generator.choice(mixed.lengths), generator.choice(mixed.lengths)) for _ in range(mixed.num_requests)]
    prompts = [
        {"prompt_token_ids": generator.choices(range(3, config["vocab_size"]), k=num_in)} for num_in, _ in lengths
    ]
    params = [
        SamplingParams(max_tokens=num_out, temperature=mixed.temperature, ignore_eos=True) for _, num_out in lengths
    ]
    start_s = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start_s
    num_out = sum(len(answer.outputs[0].token_ids) for answer in answers)
    assert num_out == sum(num_out for _, num_out in lengths), "all of them are answered in full"
    reads = [(1, num_in + i) for num_in, num_out in lengths for i in range(num_out)]
    num_steps = max(num_out for _, num_out in lengths)
    limit_s = _prefill_limit_s(config, limits, [num_in for num_in, _ in lengths])
    limit_s += _decode_limit_s(config, limits, reads, num_steps, element_size)
    first, last = mixed.lengths[0], mixed.lengths[-1]
    work = f"{mixed.num_requests} requests, {first}-{last} in and out"
    return Speed(work, seconds * 1e3, num_out / seconds, limit_s * 1e3)


def _decode_profile(llm: Any, config: dict[str, Any], batch: int, context: int, num_steps: int) -> Profile:
    """The last tokens of the prompts, which no cache keeps, are the first of the steps."""
    prompts = _prompts(config, batch, context, seed=batch)
    _seconds(llm, prompts, 2)
    work = f"kernels of decode, batch {batch}, context {context}"
    return _profile(work, 1 + num_steps, partial(_seconds, llm, prompts, 1 + num_steps))


def _profile(work: str, num_steps: int, run: Callable[[], object]) -> Profile:
    """Of all kernels that a GPU runs meanwhile; of what torch calls, where there is none."""
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    kind, time_us = (DeviceType.CUDA, "self_device_time_total") if has_gpu else (DeviceType.CPU, "self_cpu_time_total")
    kernels = [
        (event.key, event.count / num_steps, getattr(event, time_us) / num_steps)
        for event in profiler.key_averages()
        if event.device_type == kind
    ]
    return Profile(work, sorted(kernels, key=lambda kernel: -kernel[2]))


def _decode_limit_s(
    config: dict[str, Any], limits: Limits, lens: list[tuple[int, int]], num_steps: int, element_size: int
) -> float:
    """Steps that read all weights, and in all the cache of requests of so many (new tokens, tokens)."""
    cache = _attention(config, lens, element_size)
    num_bytes = num_steps * matrix_elements(config) * element_size + config["num_hidden_layers"] * cache.num_bytes
    return num_bytes / (limits.copy_gb_per_s * 1e9)


def _prefill_limit_s(config: dict[str, Any], limits: Limits, lengths: list[int]) -> float:
    """The products of prompts of so many tokens."""
    head = config["vocab_size"] * config["hidden_size"]
    attention = _attention(config, [(length, length) for length in lengths], 0)
    flops = 2 * (sum(lengths) * (matrix_elements(config) - head) + len(lengths) * head)
    return (flops + config["num_hidden_layers"] * attention.flops) / (limits.matmul_tflop_per_s * 1e12)


def _attention(config: dict[str, Any], lens: list[tuple[int, int]], size: int) -> Work:
    return attention_work(
        lens,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        size=size,
        cache_size=size,
    )


def _prompts(config: dict[str, Any], batch: int, length: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [generator.choices(range(3, config["vocab_size"]), k=length) for _ in range(batch)]


def _seconds(llm: Any, prompts: list[list[int]], output_len: int) -> float:
    from quire import SamplingParams

    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start_s
