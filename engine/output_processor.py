"""From the tokens of engines to what users receive: text, stop strings, the choices of one prompt together.

Used by the gateway (one `RequestState` per choice) and by the offline `LLM` (`OutputProcessor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from .detokenizer import TokenDecoder
from .errors import EngineError
from .outputs import (
    CompletionOutput,
    EngineOutput,
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    TokenLogprobs,
)
from .prompt_logprobs import by_token
from .stop_strings import StopMatch, StopStringMatcher

OutputKind = Literal["final", "cumulative", "delta"]


class RequestState:
    """One choice on its way to the user: the tokens received, their text, and why it ended.

    Feed it with `push`. `text`, `token_ids` and `logprobs` are the answer so far, as far as it can be shown: the tokens
    of text that is held back (half a character, the beginning of a stop string) appear together with it.

    `marks` are special tokens that stay in `text`, for whoever parses it. Users do not see them, so they are no part of
    a stop string.
    """

    __slots__ = (
        "_detokenizer",
        "_marks",
        "_matcher",
        "_min_tokens",
        "_new_detokenizer",
        "_num_shown",
        "_pieces",
        "_silent_token_ids",
        "error",
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request_id",
        "stop_reason",
        "stopped_here",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        decoder: TokenDecoder,
        *,
        index: int | None = None,
        marks: frozenset[int] = frozenset(),
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.index = request.choice_index if index is None else index
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.stopped_here = False  # a stop string ended it, so that the engine may still be at work
        self._new_detokenizer = partial(
            decoder.stream,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            keep=marks,
        )
        self._detokenizer = self._new_detokenizer()
        self._marks = marks if params.skip_special_tokens else frozenset()
        include = params.include_stop_str_in_output
        self._matcher = StopStringMatcher(params.stop, include=include) if params.stop else None
        self._min_tokens = params.min_tokens
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        self._silent_token_ids = frozenset() if include else frozenset(stops)  # at the end, where they ended it
        self._pieces: list[str] = []
        self._num_shown = 0  # tokens that earlier deltas held

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    def push(self, output: EngineOutput) -> CompletionOutput | None:
        """Take tokens; get what is new for the user, or None when there is nothing to show yet.

        Tokens received before are ignored, and so is everything after the end. Raises `EngineError` when tokens are
        missing between what was received and `output.first_index`.
        """
        if self.finish_reason is not None:
            return None
        num_known = len(self.token_ids)
        if output.first_index > num_known:
            raise EngineError(
                f"Request {self.request_id}: tokens {num_known} to {output.first_index - 1} of the answer were lost."
            )
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        text = self._take(output, output.new_token_ids[num_known - output.first_index :])
        if output.finish_reason is not None and self.finish_reason is None:
            text += self._finish(output)
        if text:
            self._pieces.append(text)
        if not text and self.finish_reason is None:
            return None
        return self._delta(text)

    def _take(self, output: EngineOutput, new_token_ids: list[int]) -> str:
        """Append tokens up to a stop string and return the text that they release."""
        known_in_output = len(output.new_token_ids) - len(new_token_ids)
        # The token that made the engine stop (EOS or a stop token) is part of the answer's tokens, not of its text.
        silent = len(new_token_ids) - 1 if output.finish_reason == "stop" else -1
        released: list[str] = []
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if self.logprobs is not None and output.logprobs is not None:
                self.logprobs.append(output.logprobs[known_in_output + i])
            if i == silent and token_id in self._silent_token_ids:
                continue
            text = self._detokenizer.push(token_id)
            if self._matcher is not None and token_id in self._marks:
                text = self._matcher.finish() + text
            elif self._matcher is not None and text:
                shown = self._matcher.push(text, armed=len(self.token_ids) >= self._min_tokens)
                if isinstance(shown, StopMatch):
                    released.append(shown.text)
                    self.finish_reason, self.stop_reason = "stop", shown.stop
                    self.stopped_here = output.finish_reason is None
                    break
                text = shown
            released.append(text)
        return "".join(released)

    def _finish(self, output: EngineOutput) -> str:
        """End as the engine says, and return the text that was held back."""
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        held = self._matcher.finish() if self._matcher is not None else ""
        return held + self._detokenizer.finish()

    def _delta(self, text: str) -> CompletionOutput:
        first, self._num_shown = self._num_shown, len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first:],
            cumulative_logprob=self.cumulative_logprob if self.finish_reason is not None else None,
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def num_tokens_of(self, num_chars: int) -> int:
        """Tokens of the answer that hold the first `num_chars` characters of `text`."""
        detokenizer, length = self._new_detokenizer(), 0
        for i, token_id in enumerate(self.token_ids):
            length += len(detokenizer.push(token_id))
            if length >= num_chars:
                return i + 1
        return len(self.token_ids)

    def completion(self) -> CompletionOutput:
        """The whole answer so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


class _Prompt:
    """The choices of one prompt, until the last of them ends."""

    __slots__ = ("num_unfinished", "prompt", "prompt_logprobs", "prompt_token_ids", "request_id", "states")

    def __init__(self, request_id: str, prompt: str | None, states: list[RequestState], token_ids: list[int]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = token_ids
        self.states = states
        self.num_unfinished = len(states)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None


class ProcessedOutputs(NamedTuple):
    """What one step brought. Prompts are in the order in which their first output arrived in the step."""

    request_outputs: list[RequestOutput]
    abort_ids: list[str]  # engine requests that a stop string ended: tell the engine


class OutputProcessor:
    """Outputs of an engine for many requests, merged per prompt. Belongs to one thread.

    `kind` says what users get: "final" one output when all choices have ended, "cumulative" the whole answer again at
    every change, "delta" what is new (only the choices that changed).
    """

    def __init__(self, decoder: TokenDecoder, kind: OutputKind = "final") -> None:
        self._decoder = decoder
        self._kind = kind
        self._requests: dict[str, tuple[_Prompt, RequestState]] = {}

    @property
    def num_unfinished(self) -> int:
        """Engine requests that have not ended."""
        return len(self._requests)

    def add(self, prompt: str | None, requests: Sequence[EngineRequest]) -> None:
        """Expect the outputs of the choices of one prompt (as `InputProcessor.process` made them)."""
        states = [RequestState(request, self._decoder) for request in requests]
        entry = _Prompt(requests[0].request_id, prompt, states, requests[0].prompt_token_ids)
        for state in states:
            self._requests[state.request_id] = (entry, state)

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """Take the outputs of a step. Outputs of requests that are unknown or have ended are ignored.

        Raises `EngineError` when tokens were lost.
        """
        changed: dict[str, tuple[_Prompt, list[CompletionOutput]]] = {}
        abort_ids: list[str] = []
        for output in outputs:
            found = self._requests.get(output.request_id)
            if found is None:
                continue
            entry, state = found
            delta = state.push(output)
            if state.finished:
                del self._requests[output.request_id]
                entry.num_unfinished -= 1
                if state.stopped_here:
                    abort_ids.append(output.request_id)
            if delta is not None and (self._kind != "final" or entry.num_unfinished == 0):
                changed.setdefault(entry.request_id, (entry, []))[1].append(delta)
        return ProcessedOutputs([self._output(entry, deltas) for entry, deltas in changed.values()], abort_ids)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Forget the prompts with these ids (and all of their choices): nothing more comes of them."""
        unwanted = frozenset(request_ids)
        for engine_id in [key for key, (entry, _) in self._requests.items() if entry.request_id in unwanted]:
            del self._requests[engine_id]

    def _output(self, entry: _Prompt, deltas: list[CompletionOutput]) -> RequestOutput:
        whole = self._kind != "delta"
        told = entry.prompt_logprobs if whole else None
        arrived = entry.states[0].prompt_logprobs
        if entry.prompt_logprobs is None and arrived is not None:
            told = entry.prompt_logprobs = by_token(arrived)
        return RequestOutput(
            request_id=entry.request_id,
            prompt=entry.prompt,
            prompt_token_ids=entry.prompt_token_ids,
            outputs=[state.completion() for state in entry.states] if whole else deltas,
            finished=entry.num_unfinished == 0,
            num_cached_tokens=entry.states[0].num_cached_tokens,
            prompt_logprobs=told,
        )
