"""Beam search on top of the engine: every beam is a prompt that asks for one token and its likeliest alternatives.

The beams of a prompt share its blocks, and each step finds what the last one computed in the prefix cache, so that a
step costs little more than the new tokens. Scoring follows Wu et al., "Google's Neural Machine Translation System"
(2016), in the simple form that Hugging Face and vLLM use: the sum of logprobs over length ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from .errors import InvalidRequestError
from .outputs import RequestOutput
from .sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAMS = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10  # no length that there is, to this power, is too large or small for a float

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """`length_penalty` above 1 favours long answers, below 1 short ones."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAMS:
            raise InvalidRequestError(
                f"beam_width: must be an integer from 1 to {MAX_BEAMS}, got {self.beam_width}.", "beam_width"
            )
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens: must be an integer >= 1, got {self.max_tokens}.", "max_tokens")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequestError(
                f"length_penalty: must be a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}, "
                f"got {self.length_penalty}.",
                "length_penalty",
            )


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `token_ids` ends with the EOS token if it was reached; `text` is filled in for finished searches."""

    token_ids: list[int]
    cumulative_logprob: float
    finished: bool = False
    text: str = ""

    def score(self, length_penalty: float) -> float:
        return float(self.cumulative_logprob / max(len(self.token_ids), 1) ** length_penalty)


class _Continuation(NamedTuple):
    """A beam and a token after it: most are dropped before they need a list of their own."""

    before: Beam
    token_id: int
    cumulative_logprob: float

    def beam(self, *, finished: bool = False) -> Beam:
        token_ids = [*self.before.token_ids, self.token_id]
        return Beam(token_ids=token_ids, cumulative_logprob=self.cumulative_logprob, finished=finished)


class BeamSearch:
    """The search itself, without an engine: ask what to run, tell it the likeliest tokens, until it wants nothing.

    The 2 * beam_width likeliest continuations of each beam are enough: at most beam_width of them end in EOS.
    """

    def __init__(
        self, prompts: Sequence[list[int]], params: BeamSearchParams, eos_token_ids: Sequence[int], max_model_len: int
    ) -> None:
        self._prompts = prompts
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_model_len = max_model_len
        self._live: list[list[Beam]] = [[Beam(token_ids=[], cumulative_logprob=0.0)] for _ in prompts]
        self._done: list[list[Beam]] = [[] for _ in prompts]
        self._num_steps = 0
        self.one_token = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, ignore_eos=True
        )  # with what each prompt of `wanted` is run

    def wanted(self) -> list[list[int]]:
        """The prompts whose next token is needed; none when the search is over."""
        for live, done, prompt in zip(self._live, self._done, self._prompts, strict=True):
            full = bool(live) and len(prompt) + len(live[0].token_ids) >= self._max_model_len
            if full or self._num_steps >= self._params.max_tokens:
                done.extend(live)
                live.clear()
        return [self._prompts[index] + beam.token_ids for index, beam in self._owners()]

    def advance(self, tops: Sequence[Sequence[tuple[int, float]]]) -> None:
        """The likeliest tokens after each of `wanted`, with their logprobs."""
        grown: list[list[_Continuation]] = [[] for _ in self._prompts]
        for (index, beam), top in zip(self._owners(), tops, strict=True):
            for token_id, logprob in top:
                continuation = _Continuation(beam, token_id, beam.cumulative_logprob + logprob)
                if token_id in self._eos:
                    self._done[index].append(continuation.beam(finished=True))
                else:
                    grown[index].append(continuation)
        for index, continuations in enumerate(grown):
            likeliest = sorted(continuations, key=lambda each: -each.cumulative_logprob)[: self._params.beam_width]
            best = [each.beam() for each in likeliest]
            self._live[index] = [] if _is_settled(self._done[index], best, self._params) else best
        self._num_steps += 1

    def results(self) -> list[list[Beam]]:
        """The `beam_width` best answers of each prompt, the best first."""
        penalty, width = self._params.length_penalty, self._params.beam_width
        return [sorted(beams, key=lambda beam: -beam.score(penalty))[:width] for beams in self._done]

    def _owners(self) -> list[tuple[int, Beam]]:
        return [(index, beam) for index, beams in enumerate(self._live) for beam in beams]


def beam_search(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> list[list[Beam]]:
    """The `beam_width` best answers of each prompt, the best first. `generate` runs a batch of token prompts."""
    search = BeamSearch(prompts, params, eos_token_ids, max_model_len)
    while wanted := search.wanted():
        search.advance([_likeliest(output) for output in generate(wanted, search.one_token)])
    return search.results()


def _likeliest(output: RequestOutput) -> list[tuple[int, float]]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return logprobs[0].top


def _is_settled(done: list[Beam], live: list[Beam], params: BeamSearchParams) -> bool:
    """Whether no live beam can displace one of the `beam_width` best that ended, whatever follows."""
    if len(done) < params.beam_width or not live:
        return not live
    best = sorted((beam.score(params.length_penalty) for beam in done), reverse=True)[params.beam_width - 1]
    # Logprobs only fall; with a positive penalty a longer answer may still score better, up to the length limit.
    longest = params.max_tokens if params.length_penalty > 0 else len(live[0].token_ids)
    return best >= float(live[0].cumulative_logprob / longest**params.length_penalty)
