"""Embeddings: what a step adds to the vectors of the prompts that are embedded, and those that it completes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.outputs import FloatArray, IntArray, NewRow, SchedulerOutput
from quire.engine.pooling import PoolingParams

from .launched_step import HostCopies
from .models.model import Model, TokenStates, slice_tokens


@dataclass(slots=True)
class _Pooled:
    """One row. `vector` holds what its steps have added so far, in float32."""

    params: PoolingParams
    num_prompt_tokens: int
    vector: Tensor | None = None


class PoolingRows:
    """Rows that become an embedding instead of sampling. Owned by the request table.

    A row that is entered again begins again: what it had belongs to blocks that it has lost.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._is_pooled: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self._rows: dict[int, _Pooled] = {}

    def set_row(self, new: NewRow) -> None:
        self._rows.pop(new.row, None)
        self._is_pooled[new.row] = new.pooling is not None
        if new.pooling is not None:
            self._rows[new.row] = _Pooled(new.pooling, new.num_prompt_tokens)

    def is_pooled(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        return self._is_pooled[rows]

    def concerns(self, rows: IntArray) -> bool:
        """Whether `compute` has something to do with some of these rows."""
        return bool(self._rows) and bool(self._is_pooled[rows].any())

    def compute(
        self, step: SchedulerOutput, model: Model, states: TokenStates, copies: HostCopies
    ) -> Callable[[], list[tuple[int, FloatArray]]]:
        """The embeddings of the prompts whose last token is in this step, by index in its batch; to be called when
        `copies` are there.

        states: of all tokens of the step. Those of these prompts may be overwritten.
        """
        if not self._rows:
            return list
        found, end = [], 0
        for index, row in enumerate(step.rows.tolist()):
            start, computed = end, int(step.num_computed_tokens[index])
            end += int(step.num_scheduled_tokens[index])
            pooled = self._rows.get(row)
            if pooled is None:
                continue
            is_last = computed + end - start == pooled.num_prompt_tokens
            chunk = slice_tokens(states, start, end)
            _add(pooled, model, chunk, end - start, is_first=computed == 0, is_last=is_last)
            if is_last:
                found.append((index, copies.start(_finished(pooled))))
                del self._rows[row]
        return lambda: [(index, vector.numpy()) for index, vector in found]


def _add(pooled: _Pooled, model: Model, chunk: TokenStates, count: int, *, is_first: bool, is_last: bool) -> None:
    """Take from a chunk of a prompt, `count` tokens, what its embedding needs."""
    match pooled.params.type:
        case "mean":
            total = model.last_hidden_state(chunk).float().sum(dim=0)
            pooled.vector = total if pooled.vector is None else pooled.vector + total
        case "cls" if is_first:
            pooled.vector = model.last_hidden_state(slice_tokens(chunk, 0, 1))[0].float()
        case "last" if is_last:
            pooled.vector = model.last_hidden_state(slice_tokens(chunk, count - 1, count))[0].float()


def _finished(pooled: _Pooled) -> Tensor:
    """[dimensions] float32, on the device."""
    vector, params = pooled.vector, pooled.params
    if vector is None:
        raise ValueError(f"a prompt of {pooled.num_prompt_tokens} tokens was not computed from its first token on")
    if params.type == "mean":
        vector = vector / pooled.num_prompt_tokens
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    return vector
