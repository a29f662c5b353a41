"""Tensors of a GGUF file under the names, and in the row order, of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.errors import ConfigError
from quire.engine.gguf_file import GGUFTensor, read_gguf
from quire.kernels.packed import BLOCK, Packing, Parts, assemble

from ..layers.parameter import Index, TensorSource

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED_IN_FILE = ("attn_q", "attn_k")
_AT_ONCE = 1 << 23  # numbers that are taken apart together


@dataclass(frozen=True, slots=True)
class _GGUFSource:
    """A tensor in a memory map. Rows (dimension 0) are cut before they are dequantized, columns after.

    llama.cpp rotates neighbouring channels and stores the rows of Q and K to match: per head, row 2i is ours i and row
    2i + 1 is ours i + head_dim / 2. `head_dim` is set where that has to be undone; slices are then whole heads.
    """

    data: npt.NDArray[np.uint8]  # the whole file
    tensor: GGUFTensor
    head_dim: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def packing(self) -> Packing | None:
        """How it stays packed, if kernels know it."""
        from .ggml_types import TYPES

        stored = TYPES.get(self.tensor.type_id)
        return stored.packing if stored is not None and len(self.shape) == 2 else None

    def read(self, index: Index) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows: npt.NDArray[Any] = dequantize(self._rows(index), GGMLQuantizationType(self.tensor.type_id))
        rows = self._in_our_order(rows)
        values = rows[:, index[-1]] if len(index) > 1 else rows[0, index[0]]
        # F32 is not dequantized: `values` is then a window on the file, which torch may not hold.
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def read_packed(self, index: Index) -> Tensor:
        """See `PackedSource`."""
        from .ggml_types import TYPES

        packing, split = TYPES[self.tensor.type_id]
        raw = self._in_our_order(self._rows(index))
        if split is None:
            return self._rearranged(raw, index[1], packing)
        packed = torch.empty(len(raw), packing.row_bytes(index[1].stop - index[1].start), dtype=torch.uint8)
        step = max(1, _AT_ONCE // self.shape[1])
        for start in range(0, len(raw), step):
            rows = np.require(raw[start : start + step], requirements=["C", "W"])
            scales, least, nested, codes = split(torch.from_numpy(rows).view(-1, self._block[1]))
            own = partial(self._columns, num_rows=len(rows), columns=index[1])
            least = None if least is None else own(least)
            parts = Parts(own(scales), least, tuple(own(part) for part in nested), own(codes))
            packed[start : start + step] = assemble(packing, parts)
        return packed

    def _columns(self, part: Tensor, num_rows: int, columns: slice) -> Tensor:
        """Of what blocks have for each number, or each few of them: [num_rows, those of some columns]."""
        of_rows = part.view(num_rows, -1)
        each = self.shape[1] // of_rows.shape[1]
        return of_rows[:, columns.start // each : columns.stop // each]

    def _rearranged(self, raw: npt.NDArray[np.uint8], columns: slice, packing: Packing) -> Tensor:
        """Rows of blocks that have their scale and their least number, if any, before their codes."""
        blocks = raw.reshape(len(raw), -1, self._block[1])
        blocks = blocks[:, columns.start // BLOCK : columns.stop // BLOCK]
        num_bytes = 2 * packing.num_kinds
        halves = [blocks[:, :, i : i + 2].reshape(len(raw), -1) for i in range(0, num_bytes, 2)]
        return torch.from_numpy(np.concatenate([*halves, blocks[:, :, num_bytes:].reshape(len(raw), -1)], axis=1))

    @property
    def _block(self) -> tuple[int, int]:
        """Numbers and bytes of one."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        return GGML_QUANT_SIZES[GGMLQuantizationType(self.tensor.type_id)]

    def _rows(self, index: Index) -> npt.NDArray[np.uint8]:
        """[num_rows, row_bytes], as they lie in the file; of a vector, one."""
        block_size, block_bytes = self._block
        row_bytes = self.shape[-1] // block_size * block_bytes
        first, last = (index[0].start, index[0].stop) if len(index) > 1 else (0, 1)
        start, stop = self.tensor.offset + first * row_bytes, self.tensor.offset + last * row_bytes
        return self.data[start:stop].reshape(last - first, row_bytes)

    def _in_our_order(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.head_dim is None:
            return rows
        return rows.reshape(-1, self.head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@contextmanager
def open_gguf(path: Path, head_dim: int) -> Iterator[dict[str, TensorSource]]:
    """The tensors of a GGUF file of the Llama architecture. Raises `ConfigError` when the file is cut short."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    file = read_gguf(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    sources: dict[str, TensorSource] = {}
    for tensor in file.tensors.values():
        try:
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
        except ValueError as error:
            raise ConfigError(f"model: {path} holds {tensor.name} in an unknown type ({tensor.type_id}).") from error
        end = tensor.offset + int(np.prod(tensor.shape)) // block_size * block_bytes
        if end > len(data):
            raise ConfigError(f"model: {path} is cut short: it has {len(data)} bytes, {tensor.name} needs {end}.")
        name, interleaved = _checkpoint_name(tensor.name)
        sources[name] = _GGUFSource(data, tensor, head_dim if interleaved else None)
    yield sources


def _checkpoint_name(name: str) -> tuple[str, bool]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, interleaved). Unknown names stay."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LLAMA_NAMES:
        return name, False
    layer, module, kind = match.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{_LLAMA_NAMES[module]}.{kind}", module in _INTERLEAVED_IN_FILE
