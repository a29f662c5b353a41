"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.engine.errors import InvalidRequestError
from quire.engine.pooling import PoolingParams

from .prompts import num_prompts, prompts_of
from .scheduling import ScheduledRequest

TO_THE_CONTEXT = -1  # as `truncate_prompt_tokens`: as many as the context holds


class EmbeddingRequest(ScheduledRequest):
    """POST /v1/embeddings. `input`: a text, token ids, or a list of either (the vectors come in its order).

    `normalize`, `add_special_tokens` and `truncate_prompt_tokens` are vLLM's: an input that is too long keeps its
    first tokens.
    """

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def inputs(self, most: int) -> list[str | list[int]]:
        """One entry per vector. Raises `InvalidRequestError`."""
        count = num_prompts(self.input)
        if count > most:
            raise InvalidRequestError(f"input: must hold at most {most} entries, got {count}.", "input")
        return prompts_of(self.input, "input")

    def pooling(self, default: PoolingParams) -> PoolingParams:
        """How the model pools, with what the request says otherwise. Raises `InvalidRequestError`."""
        normalize = default.normalize if self.normalize is None else self.normalize
        return msgspec.structs.replace(default, normalize=normalize, dimensions=self.dimensions)

    def longest(self, max_model_len: int) -> int | None:
        """Tokens that an input keeps; None where nothing is cut. Raises `InvalidRequestError`."""
        most = self.truncate_prompt_tokens
        if most is not None and most != TO_THE_CONTEXT and not 1 <= most <= max_model_len:
            limits = f"an integer from 1 to {max_model_len}, or -1 for what the context holds"
            raise InvalidRequestError(
                f"truncate_prompt_tokens: must be {limits}; got {most}.", "truncate_prompt_tokens"
            )
        return max_model_len if most == TO_THE_CONTEXT else most
