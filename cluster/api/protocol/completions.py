"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import SamplingParams

from .generation import GenerationRequest
from .prompts import num_prompts, prompts_of

DEFAULT_COMPLETION_TOKENS = 16
MAX_BEST_OF = 128


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: a text, token ids, or a list of either (the answers come in its order)."""

    prompt: Any
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    def sampling_params(self, defaults: dict[str, float], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves after the longest prompt. Raises `InvalidRequestError`.

        The default is not cut to the room here: shorter prompts have more.
        """
        self._check_best_of()
        # Those who score a text ask for its echo with logprobs, and for no answer.
        max_tokens = self._checked("max_tokens", room, least=0 if self.echo else 1)
        if max_tokens is None:
            max_tokens = self.default_max_tokens
        of_prompt = self.logprobs if self.echo else None
        params = self._sampling_params(max_tokens, self.logprobs, defaults, of_prompt)
        if self.num_choices == params.n:
            return params
        # The best are told by their logprobs.
        return msgspec.structs.replace(params, n=self.num_choices, logprobs=self.logprobs or 0)

    @property
    def default_max_tokens(self) -> int:
        return max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)

    @property
    def num_choices(self) -> int:
        return self.best_of or self.n or 1

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        least = self.n or 1
        if not least <= self.best_of <= MAX_BEST_OF:
            raise InvalidRequestError(
                f"best_of: must be an integer from n ({least}) to {MAX_BEST_OF}, got {self.best_of}.", "best_of"
            )
        if self.stream and self.best_of > least:
            raise InvalidRequestError(
                "best_of: the best answers are known only when all are complete, so it does not work with stream.",
                "best_of",
            )

    @property
    def num_prompts(self) -> int:
        """How many `prompts` has, before they are looked at."""
        return num_prompts(self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises `InvalidRequestError`."""
        return prompts_of(self.prompt, "prompt")
