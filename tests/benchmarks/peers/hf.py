"""`transformers`' own `generate`, in a process of its own: `python -m tests.benchmarks.peers.hf` prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from .answers import NUM_TOKENS, PROMPTS, Answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="*", default=[])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype))
    model.generation_config.eos_token_id = None  # an answer is as long as asked for
    model.generation_config.pad_token_id = 0
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    answers = [_generate(model, tokenizer(prompt, return_tensors="pt").input_ids, NUM_TOKENS)[0] for prompt in PROMPTS]
    rates = {batch: _rate(model, batch, args.input_len, args.output_len) for batch in args.batch}
    print(json.dumps({"answers": answers, "output_tokens_per_s": rates}))


def _rate(model: Any, batch: int, input_len: int, output_len: int) -> float:
    """Output tokens per second of one batch, prefill included."""
    prompts = torch.randint(256, 10_000, (batch, input_len), generator=torch.Generator().manual_seed(0))
    _generate(model, prompts, 2)  # warm
    start_s = time.perf_counter()
    _generate(model, prompts, output_len)
    return batch * output_len / (time.perf_counter() - start_s)


def _generate(model: Any, prompts: torch.Tensor, num_tokens: int) -> Answers:
    with torch.inference_mode():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=num_tokens,
        )
    answers: Answers = out[:, prompts.shape[1] :].tolist()
    return answers


if __name__ == "__main__":
    main()
