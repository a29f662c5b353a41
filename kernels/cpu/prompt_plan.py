"""What the requests of a step with several query tokens have in common in all layers: items of work for threads.

An item is some query tokens of a request and one KV head, with the query heads that share it; the longest come first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .matrix_tiles import configuration
from .threads import run_parallel

CHUNK = 256  # keys, which are turned for all rows of an item at once. Chunks are at fixed positions
_ROWS = 192  # of an item, about: chunks are turned for as many, and their scores stay in the second-level cache
_TILES = configuration()  # for those who have matrix tiles

_LAYER_FIELDS = ("query", "key_cache", "value_cache", "out", "token_stride", "head_stride", "plan")
_PLAN_FIELDS = (
    "block_table", "table_stride", "tokens", "positions", "counts", "requests", "counter", "num_items", "num_heads",
    "num_kv_heads", "head_dim", "block_size", "window", "item_tokens", "tiles",
)  # fmt: skip
# What differs from layer to layer, and what the layers of a step have in common. Strides are in elements.
LAYER = np.dtype([(name, np.int64) for name in _LAYER_FIELDS])
PLAN = np.dtype([*((name, np.int64) for name in _PLAN_FIELDS), ("scale", np.float64)])


class _LayerArguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _LAYER_FIELDS]


class PromptPlan:
    """The items of a step."""

    def __init__(
        self,
        requests: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        block_table: npt.NDArray[np.int32],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scale: float,
        sliding_window: int | None,
        multiple_of: int,
    ) -> None:
        """`requests` [n] are rows of `block_table` [num_reqs, max_blocks]; their query tokens begin at `starts`. Items
        have a `multiple_of` so many tokens, but for the last one of a request."""
        size = max(1, _ROWS * num_kv_heads // num_heads // multiple_of) * multiple_of  # tokens of an item
        num_parts = -(-query_lens // size)
        owners = np.repeat(np.arange(len(requests)), num_parts)
        first = (np.arange(len(owners)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * size
        positions = (seq_lens - query_lens)[owners] + first
        counts = np.minimum(size, query_lens[owners] - first)
        order = np.argsort(-(positions + counts), kind="stable")
        self._counter = np.zeros(1, np.int64)
        self._arrays = {
            "block_table": block_table,
            "tokens": (starts[owners] + first)[order],
            "positions": positions[order],
            "counts": counts[order],
            "requests": requests[owners][order],
            "counter": self._counter,
        }
        self._record = np.zeros(1, PLAN)
        fields = self._record[0]
        for name, array in self._arrays.items():
            fields[name] = array.ctypes.data
        fields["table_stride"] = block_table.strides[0] // block_table.itemsize
        fields["num_items"] = len(owners) * num_kv_heads
        fields["num_heads"], fields["num_kv_heads"], fields["head_dim"] = num_heads, num_kv_heads, head_dim
        fields["block_size"], fields["window"], fields["scale"] = block_size, sliding_window or 0, scale
        fields["item_tokens"], fields["tiles"] = size, _TILES.ctypes.data

    def attend(self, worker: Any, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
        """Attend in one layer by a compiled function of `prompts` or `prompt_tiles`. Writes the rows of `out`,
        contiguous, that were planned."""
        self._counter[0] = 0
        arguments = _LayerArguments(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            query.stride(0),
            query.stride(1),
            self._record.ctypes.data,
        )
        run_parallel(worker.ctypes, ctypes.addressof(arguments), torch.get_num_threads())
