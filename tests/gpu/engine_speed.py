"""How long a step of the engine takes, with dummy weights in the shapes of known models: nothing is downloaded.

A decode step reads every weight, and the keys and values of every request: its limit is their bytes at the speed of a
copy. A prefill's is the products with the weights at the speed of a matrix product.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.workers.kernel_bench.measure import Limits
from quire.workers.kernel_bench.work import attention_work

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


def measure(
    config: dict[str, Any],
    limits: Limits,
    *,
    batches: Sequence[int],
    context: int,
    prefills: Sequence[int],
    num_steps: int = 64,
    element_size: int = 2,
    **engine: Any,
) -> list[Speed]:
    """Decode steps at a context, and whole prefills. `engine`: options of `quire.LLM`."""
    from quire import LLM

    longest = max(context + num_steps + 2, *prefills, 1) + 2
    with dummy_model(config) as path:
        llm = LLM(
            str(path),
            load_format="dummy",
            max_model_len=longest,
            max_num_seqs=max(batches),
            **engine,
        )
        try:
            decodes = [_decode(llm, config, limits, batch, context, num_steps, element_size) for batch in batches]
            return decodes + [_prefill(llm, config, limits, num_tokens) for num_tokens in prefills]
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
    cache = attention_work(
        [(1, context + num_steps // 2)] * batch,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        size=element_size,
        cache_size=element_size,
    )
    num_bytes = matrix_elements(config) * element_size + config["num_hidden_layers"] * cache.num_bytes
    limit_s = num_bytes / (limits.copy_gb_per_s * 1e9)
    return Speed(f"decode, batch {batch}, context {context}", step_s * 1e3, batch / step_s, limit_s * 1e3)


def _prefill(llm: Any, config: dict[str, Any], limits: Limits, num_tokens: int) -> Speed:
    first, second = (_prompts(config, 1, num_tokens, seed=num_tokens + i) for i in range(2))
    _seconds(llm, first, 1)
    seconds = _seconds(llm, second, 1)
    head = config["vocab_size"] * config["hidden_size"]
    attention = attention_work(
        [(num_tokens, num_tokens)],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        size=0,
        cache_size=0,
    )
    flops = 2 * (num_tokens * (matrix_elements(config) - head) + head) + config["num_hidden_layers"] * attention.flops
    limit_s = flops / (limits.matmul_tflop_per_s * 1e12)
    return Speed(f"prefill {num_tokens}", seconds * 1e3, num_tokens / seconds, limit_s * 1e3)


def _prompts(config: dict[str, Any], batch: int, length: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [generator.choices(range(3, config["vocab_size"]), k=length) for _ in range(batch)]


def _seconds(llm: Any, prompts: list[list[int]], output_len: int) -> float:
    from quire import SamplingParams

    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start_s
