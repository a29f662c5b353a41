"""Builds the attention metadata of a step: one record per KV cache group."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.ops import AttentionMetadata

from .input_buffers import DeviceInputs, HostInputs


def build_attention_metadata(
    host: HostInputs, inputs: DeviceInputs, block_tables: Tensor, max_blocks: int
) -> list[AttentionMetadata]:
    """One record per group; they share everything but the block table and the slots.

    block_tables: [num_groups, max_num_seqs, ...] int32, of all rows, of which those of the step are gathered, with
    their first `max_blocks` entries. Copies nothing from the host, so that a graph may be captured of it.
    """
    tables = block_tables[:, :, :max_blocks].index_select(1, inputs.rows)
    return [
        AttentionMetadata(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=table,
            slot_mapping=slots,
            query_start_loc_np=host.query_start_loc,
            seq_lens_np=host.seq_lens,
        )
        for table, slots in zip(tables, inputs.slot_mapping, strict=True)
    ]
