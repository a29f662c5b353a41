"""Presence, frequency and repetition penalties, on the tokens that occur in a row instead of the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.outputs import FloatArray, IntArray
from quire.engine.sampling_params import SamplingParams

from ..transfers import to_device


class TokenCounts:
    """Which tokens occur in one row, and how often among its output tokens. Owned by `SamplingRows`.

    It follows the row: `advance` counts the tokens that were added since the last call.
    """

    __slots__ = ("_counts", "_num_counted", "_num_prompt_tokens", "_params", "_places", "_size", "_token_ids")

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        # Presence and frequency ask for output tokens alone: the prompt is skipped when nothing repeats it.
        self._num_counted = 0 if params.repetition_penalty != 1.0 else num_prompt_tokens
        self._places: dict[int, int] = {}  # token id -> its place in the two arrays
        self._token_ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._size = 0

    def advance(self, token_ids: IntArray, num_tokens: int) -> None:
        """Count the tokens of the row (`token_ids[:num_tokens]`) that are not counted yet."""
        for position, token_id in enumerate(token_ids[self._num_counted : num_tokens].tolist(), self._num_counted):
            place = self._place(token_id)
            if position >= self._num_prompt_tokens:
                self._counts[place] += 1.0
        self._num_counted = max(self._num_counted, num_tokens)

    def entries(self) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """The distinct tokens of the row, and how often each is among the output tokens (0: in the prompt only)."""
        return self._token_ids[: self._size], self._counts[: self._size]

    @property
    def params(self) -> SamplingParams:
        return self._params

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._size += 1
        return place


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """Logits to penalise: entry j is token `token_ids[j]` of batch index `indices[j]`, each at most once."""

    indices: npt.NDArray[np.int64]  # [m]
    token_ids: npt.NDArray[np.int64]  # [m]
    subtract: FloatArray  # [m] frequency_penalty * count + presence_penalty where the count is not 0
    repetition: FloatArray  # [m] repetition_penalty

    @classmethod
    def concatenate(cls, parts: list[tuple[int, TokenCounts]]) -> PenaltyEntries:
        """From (batch index, counts of its row) pairs."""
        token_ids, subtract = [], []
        for _, counts in parts:
            ids, times = counts.entries()
            token_ids.append(ids)
            subtract.append(counts.params.frequency_penalty * times + counts.params.presence_penalty * (times > 0))
        lengths = [len(ids) for ids in token_ids]
        repetition = [counts.params.repetition_penalty for _, counts in parts]
        return cls(
            indices=np.repeat(np.array([i for i, _ in parts], np.int64), lengths),
            token_ids=np.concatenate(token_ids),
            subtract=np.concatenate(subtract).astype(np.float32),
            repetition=np.repeat(np.array(repetition, np.float32), lengths),
        )


def apply_penalties(logits: Tensor, entries: PenaltyEntries) -> None:
    """Penalise in place; `logits` is [num_reqs, vocab] float32.

    The repetition penalty (arXiv 1909.05858) divides positive logits and multiplies the others, for every token of the
    prompt and the output; then the frequency and presence penalties (as OpenAI defines them) of output tokens are
    subtracted.
    """
    indices = to_device(entries.indices, logits.device)
    token_ids = to_device(entries.token_ids, logits.device)
    repetition = to_device(entries.repetition, logits.device)
    values = logits[indices, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[indices, token_ids] = values - to_device(entries.subtract, logits.device)
