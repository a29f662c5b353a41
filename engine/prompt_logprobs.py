"""The logprobs of a prompt, from the steps that compute them to the first output that takes them along."""

from __future__ import annotations

import numpy as np

from .errors import EngineError
from .outputs import PromptLogprobs, TokenLogprobs


class PromptLogprobsBuffer:
    """Gathers what steps bring of one prompt. Owned by its `Request`.

    `next_position` is the first prompt position whose logprobs are not here. A request that lost its row goes on from
    there: what steps brought before is kept, and no position comes twice.
    """

    __slots__ = ("_parts", "next_position")

    def __init__(self) -> None:
        self.next_position = 1  # nothing precedes the first token, so it has none
        self._parts: list[PromptLogprobs] = []

    def add(self, part: PromptLogprobs) -> None:
        if part.first_position != self.next_position:
            raise EngineError(
                f"logprobs of prompt position {part.first_position} came where those of {self.next_position} are next"
            )
        self._parts.append(part)
        self.next_position += len(part.ranks)

    def take(self, num_prompt_tokens: int) -> PromptLogprobs:
        """Those of the whole prompt. Raises `EngineError` when some did not come."""
        if self.next_position < num_prompt_tokens:
            raise EngineError(f"the logprobs of {num_prompt_tokens} prompt tokens end before {self.next_position}")
        if not self._parts:  # a prompt of one token
            empty = np.empty((0, 1), np.int32)
            return PromptLogprobs(1, empty, empty.astype(np.float32), np.empty(0, np.int32))
        return PromptLogprobs(
            1,
            np.concatenate([part.token_ids for part in self._parts]),
            np.concatenate([part.logprobs for part in self._parts]),
            np.concatenate([part.ranks for part in self._parts]),
        )


def by_token(prompt_logprobs: PromptLogprobs) -> list[TokenLogprobs | None]:
    """One entry per token of the prompt, as users receive them; None for the first."""
    columns = (prompt_logprobs.token_ids.tolist(), prompt_logprobs.logprobs.tolist(), prompt_logprobs.ranks.tolist())
    entries: list[TokenLogprobs | None] = [None]
    for token_ids, values, rank in zip(*columns, strict=True):
        top = list(zip(token_ids[1:], values[1:], strict=True))
        entries.append(TokenLogprobs(token_ids[0], values[0], rank, top))
    return entries
