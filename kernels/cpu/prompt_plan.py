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

from .attention_call import Shape, layer_arguments, new_plan, plan_type
from .matrix_tiles import configuration
from .threads import run_parallel

_ROWS = 192  # of an item, about: chunks of keys are turned for as many, and their scores stay in the second-level cache
_TILES = configuration()  # for those who have matrix tiles

PLAN = plan_type(
    *("block_table", "table_stride", "tokens", "positions", "counts", "requests", "counter", "num_items"),
    *("item_tokens", "tiles"),
)


class PromptPlan:
    """The items of a step."""

    def __init__(
        self,
        requests: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        block_table: npt.NDArray[np.int32],
        shape: Shape,
        multiple_of: int,
    ) -> None:
        """`requests` [n] are rows of `block_table` [num_reqs, max_blocks]; their query tokens begin at `starts`. Items
        have a `multiple_of` so many tokens, but for the last one of a request."""
        size = max(1, _ROWS * shape.num_kv_heads // shape.num_heads // multiple_of) * multiple_of  # tokens of an item
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
        self._record = new_plan(PLAN, shape)
        fields = self._record[0]
        for name, array in self._arrays.items():
            fields[name] = array.ctypes.data
        fields["table_stride"] = block_table.strides[0] // block_table.itemsize
        fields["num_items"] = len(owners) * shape.num_kv_heads
        fields["item_tokens"], fields["tiles"] = size, _TILES.ctypes.data

    def attend(
        self,
        worker: Any,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attend in one layer by a compiled function of `prompts` or `prompt_tiles`. Writes the rows of `out`,
        contiguous, that were planned."""
        self._counter[0] = 0
        arguments = layer_arguments(query, key_cache, value_cache, out, sinks, self._record)
        run_parallel(worker.ctypes, ctypes.addressof(arguments), torch.get_num_threads())
