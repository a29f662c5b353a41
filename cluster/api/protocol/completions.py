"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import SamplingParams

from .generation import GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: a text, token ids, or a list of either (the answers come in its order)."""

    prompt: Any
    logprobs: int | None = None
    echo: bool = False

    def sampling_params(self, defaults: dict[str, float], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves after the longest prompt. Raises `InvalidRequestError`.

        The default is not cut to the room here: shorter prompts have more.
        """
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo: together with logprobs is not supported yet.", "echo", "unsupported")
        default = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        return self._sampling_params(self._checked("max_tokens", room) or default, self.logprobs, defaults)

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
