"""Beam search on top of the engine: every beam is a prompt that asks for one token and its likeliest alternatives.

The beams of a prompt share its blocks, and each step finds what the last one computed in the prefix cache, so that a
step costs little more than the new tokens. Scoring follows Wu et al., "Google's Neural Machine Translation System"
(2016), in the simple form that Hugging Face and vLLM use: the sum of logprobs over length ** length_penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from .errors import InvalidRequestError
from .outputs import RequestOutput
from .sampling_params import MAX_LOGPROBS, SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """`length_penalty` above 1 favours long answers, below 1 short ones."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        most = MAX_LOGPROBS // 2
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= most:
            raise InvalidRequestError(
                f"beam_width: must be an integer from 1 to {most}, got {self.beam_width}.", "beam_width"
            )
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens: must be an integer >= 1, got {self.max_tokens}.", "max_tokens")
        if not math.isfinite(self.length_penalty):
            raise InvalidRequestError(
                f"length_penalty: must be a finite number, got {self.length_penalty}.", "length_penalty"
            )


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `token_ids` ends with the EOS token if it was reached; `text` is filled in for finished searches."""

    token_ids: list[int]
    cumulative_logprob: float
    finished: bool = False
    text: str = ""

    def score(self, length_penalty: float) -> float:
        return float(self.cumulative_logprob / max(len(self.token_ids), 1) ** length_penalty)


def beam_search(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> list[list[Beam]]:
    """The `beam_width` best answers of each prompt, the best first. `generate` runs a batch of token prompts.

    The 2 * beam_width likeliest continuations of each beam are enough: at most beam_width of them end in EOS.
    """
    width = params.beam_width
    one_token = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * width, ignore_eos=True)
    eos = frozenset(() if params.ignore_eos else eos_token_ids)
    live: list[list[Beam]] = [[Beam(token_ids=[], cumulative_logprob=0.0)] for _ in prompts]
    done: list[list[Beam]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        for index, prompt in enumerate(prompts):
            if live[index] and len(prompt) + len(live[index][0].token_ids) >= max_model_len:
                done[index].extend(live[index])
                live[index] = []
        owners = [(index, beam) for index, beams in enumerate(live) for beam in beams]
        if not owners:
            break
        outputs = generate([prompts[index] + beam.token_ids for index, beam in owners], one_token)
        grown: list[list[Beam]] = [[] for _ in prompts]
        for (index, beam), output in zip(owners, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            for token_id, logprob in logprobs[0].top:
                total = beam.cumulative_logprob + logprob
                longer = Beam(token_ids=[*beam.token_ids, token_id], cumulative_logprob=total, finished=token_id in eos)
                (done if longer.finished else grown)[index].append(longer)
        for index in range(len(prompts)):
            live[index] = sorted(grown[index], key=lambda beam: -beam.cumulative_logprob)[:width]
            if _is_settled(done[index], live[index], params):
                live[index] = []
    ranked = ([*ended, *beams] for ended, beams in zip(done, live, strict=True))
    return [sorted(beams, key=lambda beam: -beam.score(params.length_penalty))[:width] for beams in ranked]


def _is_settled(done: list[Beam], live: list[Beam], params: BeamSearchParams) -> bool:
    """Whether no live beam can displace one of the `beam_width` best that ended, whatever follows."""
    if len(done) < params.beam_width or not live:
        return not live
    best = sorted((beam.score(params.length_penalty) for beam in done), reverse=True)[params.beam_width - 1]
    # Logprobs only fall; with a positive penalty a longer answer may still score better, up to the length limit.
    longest = params.max_tokens if params.length_penalty > 0 else len(live[0].token_ids)
    return best >= float(live[0].cumulative_logprob / longest**params.length_penalty)
