"""What the device keeps of the running requests from step to step, by row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.tokens import keep_tokens, resolve_tokens

from .input_buffers import DeviceInputs, HostInputs
from .request_table import RequestTable
from .transfers import to_device


class DeviceRows:
    """Block tables, which change where a step adds a block, and the last token that each row has sampled, which
    feeds the next step without the host having seen it. Written by what is launched on the device, in its order.

    With one step in flight nobody reads these tokens: `keeps_tokens` False, and there are no references to resolve.
    """

    def __init__(self, table: RequestTable, device: torch.device, *, keeps_tokens: bool) -> None:
        shape = table.block_tables.shape
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)  # [num_groups, max_num_seqs, blocks]
        self._keeps_tokens = keeps_tokens
        # [max_num_seqs + 1]; the last one is for padding to write to
        self.last_token_ids = torch.zeros(table.no_row + 1, dtype=torch.int64, device=device)

    @property
    def max_blocks(self) -> int:
        return self.block_tables.shape[2]

    def resolve(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] with references, see `RequestTable` -> the tokens. Fit to be captured."""
        return resolve_tokens(token_ids, self.last_token_ids) if self._keeps_tokens else token_ids

    def write_blocks(self, entries: Tensor, block_ids: Tensor) -> None:
        """The entries [m] int64 of the flat tables become `block_ids` [m] int32."""
        self.block_tables.view(-1).index_copy_(0, entries, block_ids)

    def write_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        """Rows [m] int64 have sampled `token_ids` [m] int64. A row that is there more than once had drafts, and is not
        read before it has sampled again. Fit to be captured."""
        if self._keeps_tokens:
            keep_tokens(self.last_token_ids, rows, token_ids)


class BlockChanges:
    """The blocks that a step adds, on their way to the device: in its inputs, or where they are too many by themselves.

    An entry may be there twice; both times it becomes what the table has now.
    """

    def __init__(self, table: RequestTable, target: HostInputs) -> None:
        entries = table.take_block_changes()
        block_ids = table.block_tables.reshape(-1)[entries]
        self._count = len(entries)
        self._own: tuple[np.ndarray, np.ndarray] | None = None
        if self._count <= len(target.block_entries):
            target.block_entries[: self._count] = entries
            target.block_ids[: self._count] = block_ids
        else:  # whole prompts were admitted
            self._own = entries, block_ids

    def apply(self, rows: DeviceRows, inputs: DeviceInputs) -> None:
        """To be called when the inputs of the step are on their way."""
        if self._own is not None:
            rows.write_blocks(*(to_device(each, inputs.rows.device) for each in self._own))
        elif self._count:
            rows.write_blocks(inputs.block_entries[: self._count], inputs.block_ids[: self._count])
