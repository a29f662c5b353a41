"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import SamplingParams

from .generation import GenerationRequest

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
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo: together with logprobs is not supported yet.", "echo", "unsupported")
        self._check_best_of()
        max_tokens = self._checked("max_tokens", room) or self.default_max_tokens
        params = self._sampling_params(max_tokens, self.logprobs, defaults)
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

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises `InvalidRequestError`."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_token_ids(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not all(isinstance(one, str) or _is_token_ids(one) for one in prompt):
            raise InvalidRequestError(
                "prompt: must be a string, a list of token ids, or a list of either, and none of them empty.", "prompt"
            )
        if not prompt or not all(prompt):
            raise InvalidRequestError("prompt: must not be empty.", "prompt")
        return prompt


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)
