"""What the sampler needs to know about the rows it samples for, gathered each step from per-row arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.outputs import FloatArray, IntArray, NewRow

from .constraints import Constraints, RowConstraints
from .penalties import PenaltyEntries, TokenCounts
from .rng import uniform

Int64Array = npt.NDArray[np.int64]

DRAW_TOKEN = 0  # the draw that picks the token of a position


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Single logits of the batch: entry j is token `token_ids[j]` of batch index `indices[j]`, each at most once."""

    indices: Int64Array  # [m]
    token_ids: Int64Array  # [m]
    values: FloatArray  # [m] what is added


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """All that some rows of the batch may sample: token t is bit t % 32 of word t // 32."""

    indices: Int64Array  # [m]
    allowed: IntArray  # [m, ceil(vocab_size / 32)]


class HostDraws(NamedTuple):
    """How rows draw their tokens: what `kernels.sampling.Draws` is on the device, [n] each."""

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    numbers: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What else decides the tokens of the rows that sample in one step, in the order of their logits. On the host.

    The optional fields are None when no row uses the feature, which then costs nothing.
    """

    num_logprobs: IntArray  # [n]; -1: none wanted, 0: the sampled token only
    logit_bias: LogitEntries | None = None
    constraints: Constraints | None = None
    penalties: PenaltyEntries | None = None
    masks: TokenMasks | None = None  # of rows with a grammar

    @property
    def num_reqs(self) -> int:
        return len(self.num_logprobs)


class SamplingRows:
    """Sampling parameters by row, and the token counts of the rows with penalties. Owned by the request table.

    `set_row` overwrites a row; rows that are not in use hold stale values, which nobody reads. Token ids outside the
    vocabulary in a list or a bias can never be sampled, so they are left out.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._choice_indices = np.zeros(max_num_seqs, np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._logit_bias: dict[int, tuple[Int64Array, FloatArray]] = {}
        self._constraints: dict[int, RowConstraints] = {}
        self._counts: dict[int, TokenCounts] = {}

    def set_row(self, new: NewRow) -> None:
        """Take over the parameters of a request that enters row `new.row`."""
        row, params = new.row, new.sampling_params
        self._temperature[row] = params.temperature
        self._top_k[row] = min(params.top_k, np.iinfo(np.int32).max)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._choice_indices[row] = new.choice_index
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        for by_row in (self._logit_bias, self._constraints, self._counts):
            by_row.pop(row, None)
        constraints = RowConstraints.of(new, self._vocab_size)
        if constraints is not None:
            self._constraints[row] = constraints
        if params.logit_bias:
            bias = {i: value for i, value in params.logit_bias.items() if i < self._vocab_size}
            self._logit_bias[row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        if params.has_penalties:
            self._counts[row] = TokenCounts(params, new.num_prompt_tokens)

    def is_plain(self, rows: IntArray) -> bool:
        """Whether nothing that `gather` would give of these rows changes their logits or asks for logprobs."""
        if (self._num_logprobs[rows] >= 0).any():
            return False
        asking = [by_row for by_row in (self._logit_bias, self._constraints, self._counts) if by_row]
        return not asking or not any(row in by_row for by_row in asking for row in rows.tolist())

    def reads_tokens(self, rows: IntArray) -> bool:
        """Whether `gather` reads the tokens of some of these rows: those with penalties or bad words."""
        if not self._counts and not self._constraints:
            return False
        return any(row in self._counts or self._has_bad_words(row) for row in rows.tolist())

    def _has_bad_words(self, row: int) -> bool:
        constraints = self._constraints.get(row)
        return constraints is not None and constraints.bad_words is not None

    def draws(self, rows: IntArray, positions: IntArray) -> HostDraws | None:
        """How the given rows draw their tokens; None where all of them take the likeliest.

        Args:
            rows: [n] the rows that sample in this step.
            positions: [n] of the tokens to sample. A row with drafts is there once for each of them.
        """
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        numbers = uniform(self._seeds[rows], self._choice_indices[rows], positions, DRAW_TOKEN)
        return HostDraws(temperature, self._top_k[rows], self._top_p[rows], self._min_p[rows], numbers)

    def gather(
        self, rows: IntArray, positions: IntArray, token_ids: IntArray, masks: TokenMasks | None = None
    ) -> SamplingBatch:
        """The batch of the given rows, in their order.

        Args:
            rows, positions: as of `draws`.
            token_ids: [max_num_seqs, max_len] the tokens of every row; read where `reads_tokens` says so, below their
                position.
            masks: of rows with a grammar; its indices count `rows`.
        """
        return SamplingBatch(
            num_logprobs=self._num_logprobs[rows],
            logit_bias=self._gather_logit_bias(rows) if self._logit_bias else None,
            constraints=(
                Constraints.gather(self._constraints, rows, positions, token_ids) if self._constraints else None
            ),
            penalties=self._gather_penalties(rows, positions, token_ids) if self._counts else None,
            masks=masks,
        )

    def _gather_logit_bias(self, rows: IntArray) -> LogitEntries | None:
        found = [(i, self._logit_bias[row]) for i, row in enumerate(rows.tolist()) if row in self._logit_bias]
        return _concatenate([(i, token_ids, values) for i, (token_ids, values) in found])

    def _gather_penalties(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> PenaltyEntries | None:
        parts = []
        for i, row in enumerate(rows.tolist()):
            counts = self._counts.get(row)
            if counts is not None:
                counts.advance(token_ids[row], int(positions[i]))
                parts.append((i, counts))
        return PenaltyEntries.concatenate(parts) if parts else None


def _concatenate(parts: list[tuple[int, Int64Array, FloatArray]]) -> LogitEntries | None:
    if not parts:
        return None
    lengths = [len(token_ids) for _, token_ids, _ in parts]
    return LogitEntries(
        indices=np.repeat(np.array([i for i, _, _ in parts], np.int64), lengths),
        token_ids=np.concatenate([token_ids for _, token_ids, _ in parts]),
        values=np.concatenate([values for _, _, values in parts]),
    )
