"""`python -m tests.benchmarks.speculation`: what drafts are worth on the default model, and that they change no token.

Two engines in one process, with drafts and without, answer the same prompts in turns: questions as people ask them,
tasks that quote their prompt, and random tokens, whose greedy answers mostly repeat themselves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from quire import LLM, SamplingParams
from quire.cluster.bench.machine import describe_machine
from quire.cluster.bench.workload import random_token_prompts
from quire.engine.outputs import RequestOutput

QUESTIONS = (
    "What is the capital of France? Tell me about it.",
    "Explain how a bicycle works.",
    "Write a Python function that sorts a list of numbers with quicksort, with comments.",
    "List ten animals and one fact about each.",
    "Tell a short story about a fox and a river.",
    "What are the advantages and disadvantages of solar power?",
    "Write a letter to a friend about a trip to the sea.",
    "What is the difference between a virus and a bacterium?",
)
TEXT = (
    "The lighthouse keeper climbed the stairs every evening at six, lit the lamp, and wrote the weather in his book. "
    "On Sundays a boat brought bread, letters and oil. In winter the boat did not come for weeks, and he baked himself."
)
TASKS = (
    f"Repeat this text word for word: {TEXT}",
    f"Correct the spelling of this text, and change nothing else: {TEXT}",
    f"Rewrite this text in the present tense: {TEXT}",
    f"Quote the sentences of this text one by one, each with its number: {TEXT}",
)
PROMPT_LEN = 128


def main() -> int:
    """0: every answer was the same."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.speculation", description=__doc__)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument(
        "--drafts", type=int, help="num_speculative_tokens; default: as many as an engine gives by itself"
    )
    parser.add_argument("--requests", default="1,4", help="at a time")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.drafts is None and args.precision != "float32":
        args.drafts = 4
    print(" · ".join(f"{name} {value}" for name, value in describe_machine().items()), f"· {args.precision}\n")
    print("| prompts | temperature | requests | tokens/s without | with drafts | ratio | tokens per step | accepted |")
    print("|---|---|---|---|---|---|---|---|")
    engines = [_engine(args.precision, count) for count in (0, args.drafts)]
    for engine in engines:  # steps of every size that occurs are recorded
        for num_requests in range(1, 9):
            _answer(
                engine,
                "random",
                -num_requests,
                num_requests,
                SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0),
            )
    are_same = True
    for kind in ("questions", "tasks", "random"):
        for temperature in (0.0, 0.8):
            for count in map(int, args.requests.split(",")):
                are_same &= _compare(engines, kind, temperature, count, args.output_len, args.rounds)
    print("\nAll answers are the same." if are_same else "\nSome answers differ.")
    for engine in engines:
        engine.shutdown()
    return 0 if are_same else 1


def _engine(precision: str, num_speculative_tokens: int | None) -> LLM:
    chosen = {"quantization": "int8"} if precision == "int8" else {"dtype": precision}
    return LLM(
        max_model_len=2048,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 29,
        num_speculative_tokens=num_speculative_tokens,
        **chosen,  # type: ignore[arg-type]
    )


def _compare(
    engines: Sequence[LLM], kind: str, temperature: float, num_requests: int, output_len: int, rounds: int
) -> bool:
    """Prints one row of the table."""
    params = SamplingParams(max_tokens=output_len, temperature=temperature, top_p=0.95, seed=3, ignore_eos=True)
    rates: tuple[list[float], list[float]] = ([], [])
    before, are_same = _counts(engines[1]), True
    for turn in range(rounds):
        answers = []
        for engine, of_engine in zip(engines, rates, strict=True):
            _answer(engine, kind, turn, num_requests, SamplingParams(max_tokens=1))  # its prompts are in the cache
            started = time.perf_counter()
            outputs = _answer(engine, kind, turn, num_requests, params)
            of_engine.append(num_requests * output_len / (time.perf_counter() - started))
            answers.append([output.outputs[0].token_ids for output in outputs])
        are_same &= answers[0] == answers[1]
    drafts, accepted = (after - count for after, count in zip(_counts(engines[1]), before, strict=True))
    tokens = rounds * num_requests * (output_len - 1)
    without, with_drafts = map(statistics.median, rates)
    print(
        f"| {kind} | {temperature} | {num_requests} | {without:.1f} | {with_drafts:.1f} "
        f"| **{with_drafts / without:.2f}×** "
        f"| {tokens / (tokens - accepted):.2f} | {accepted / max(drafts, 1):.0%} of {drafts} |",
        flush=True,
    )
    return are_same


def _answer(llm: LLM, kind: str, turn: int, num_requests: int, params: SamplingParams) -> list[RequestOutput]:
    if kind == "random":
        prompts = random_token_prompts(num_requests, PROMPT_LEN, 49_152, turn + 1000)
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    texts = QUESTIONS if kind == "questions" else TASKS
    chosen = [texts[(turn * num_requests + i) % len(texts)] for i in range(num_requests)]
    return llm.chat([[{"role": "user", "content": text}] for text in chosen], params, use_tqdm=False)


def _counts(llm: LLM) -> tuple[int, int]:
    """(drafts, those accepted) of an engine so far."""
    stats = llm.stats()
    return stats.num_draft_tokens, stats.num_accepted_tokens


if __name__ == "__main__":
    sys.exit(main())
