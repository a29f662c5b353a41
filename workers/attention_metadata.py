"""Builds the attention metadata of a step: one record per KV cache group."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.outputs import IntArray
from quire.kernels.ops import AttentionMetadata

from .request_table import RequestTable


def build_attention_metadata(
    table: RequestTable,
    rows: IntArray,
    query_start_loc: IntArray,
    seq_lens: IntArray,
    token_rows: IntArray,
    positions: IntArray,
    block_size: int,
    device: torch.device,
) -> list[AttentionMetadata]:
    """One record per group; they share everything but the block table and the slots.

    rows, seq_lens: [num_reqs]; query_start_loc: [num_reqs + 1]; token_rows, positions: [num_tokens], the row and the
    position of every token of the step.
    """
    max_blocks = -(-int(seq_lens.max()) // block_size)
    starts, lengths = _to_device(query_start_loc, device), _to_device(seq_lens, device)
    block_index, offset = positions // block_size, positions % block_size
    metadata = []
    for block_table in table.block_tables:
        slots = block_table[token_rows, block_index].astype(np.int64) * block_size + offset
        metadata.append(
            AttentionMetadata(
                query_start_loc=starts,
                seq_lens=lengths,
                block_table=_to_device(block_table[rows, :max_blocks], device),
                slot_mapping=_to_device(slots, device),
                query_start_loc_np=query_start_loc,
                seq_lens_np=seq_lens,
            )
        )
    return metadata


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
