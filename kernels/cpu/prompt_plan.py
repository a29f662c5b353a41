"""What the requests of a step with several query tokens have in common in all layers: items of work for threads.

An item is some query tokens of a request and one KV head, with the query heads that share it; the longest come first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .attention_call import Layer, Shape, layer_call, new_plan, plan_type
from .matrix_tiles import configuration
from .threads import run_call

_ROWS = 192  # of an item, about: chunks of keys are turned for as many, and their scores stay in the second-level cache
_TILES = configuration()  # for those who have matrix tiles

PLAN = plan_type(
    *("block_table", "table_stride", "tokens", "positions", "counts", "requests", "num_items"),
    *("item_tokens", "tiles"),
)


class PromptPlan:
    """The items of a step, in a record that stays where it is: another step may be planned in it."""

    def __init__(self, shape: Shape, multiple_of: int) -> None:
        """Items have a `multiple_of` so many tokens, but for the last one of a request."""
        self._shape, self._record = shape, new_plan(PLAN, shape)
        self._size = max(1, _ROWS * shape.num_kv_heads // shape.num_heads // multiple_of) * multiple_of
        fields = self._record[0]
        fields["item_tokens"], fields["tiles"] = self._size, _TILES.ctypes.data

    def read(
        self, starts: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], block_table: npt.NDArray[np.int32]
    ) -> None:
        """Plan for a step: of its requests [num_reqs], those with several query tokens. `starts` [num_reqs + 1] is
        where the query tokens of a request begin, and end; `block_table` [num_reqs, max_blocks]."""
        requests = np.flatnonzero(np.diff(starts) > 1)
        begins, query_lens = starts[requests].astype(np.int64), np.diff(starts)[requests].astype(np.int64)
        num_parts = -(-query_lens // self._size)
        owners = np.repeat(np.arange(len(requests)), num_parts)
        first = (np.arange(len(owners)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * self._size
        positions = (seq_lens[requests] - query_lens)[owners] + first
        counts = np.minimum(self._size, query_lens[owners] - first)
        order = np.argsort(-(positions + counts), kind="stable")
        self._arrays = {
            "block_table": block_table,
            "tokens": (begins[owners] + first)[order],
            "positions": positions[order],
            "counts": counts[order],
            "requests": requests[owners][order],
        }
        fields = self._record[0]
        for name, array in self._arrays.items():
            fields[name] = array.ctypes.data
        fields["table_stride"] = block_table.strides[0] // block_table.itemsize
        fields["num_items"] = len(owners) * self._shape.num_kv_heads

    def attend(self, worker: Any, layer: Layer) -> None:
        """Attend in one layer by a compiled function of `prompts` or `prompt_tiles`. Writes the rows of its `out`,
        contiguous, that were planned."""
        run_call(layer_call(worker, layer, self._record))
