"""Tensors of a GGUF file under the names, and in the row order, of a Hugging Face checkpoint."""

from __future__ import annotations

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
from ..models.families import Family, HFConfig, family_of
from .views import turned

# llama.cpp rotates neighbouring channels of these, which their checkpoints do not: rows of Q and K are stored to match.
_INTERLEAVED = {"llama", "granite", "smollm3"}
# Norms of these are stored as what they multiply by; their checkpoints have that minus one.
_NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3"}
# Matrices of experts of these are stored as others' are, [out, in], which their checkpoints have the other way round.
_TURNED = {"gpt-oss"}
_OF_POSITIONS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # see `gguf_config`
_AT_ONCE = 1 << 23  # numbers that are taken apart together


@dataclass(frozen=True, slots=True)
class _GGUFSource:
    """A tensor in a memory map. Rows (of one expert, where it has three dimensions) are cut before they are
    dequantized, columns after.

    Where `head_dim` is set rows are interleaved: per head, row 2i of the file is ours i, and row 2i + 1 is ours
    i + head_dim / 2. Slices are then whole heads.
    """

    data: npt.NDArray[np.uint8]  # the whole file, or part of it, that the tensor lies in
    tensor: GGUFTensor
    head_dim: int | None = None
    added: float = 0.0  # to what the checkpoint has

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def packing(self) -> Packing | None:
        """How it stays packed, if kernels know it."""
        from .ggml_types import TYPES

        stored = TYPES.get(self.tensor.type_id)
        return stored.packing if stored is not None and len(self.shape) > 1 else None

    def read(self, index: Index) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows: npt.NDArray[Any] = dequantize(self._rows(index), GGMLQuantizationType(self.tensor.type_id))
        values = self._in_our_order(rows)[:, index[-1]] if len(index) > 1 else self._in_our_order(rows.T)[index[0], 0]
        if self.added:
            values = values - np.float32(self.added)
        # F32 is not dequantized: `values` is then a window on the file, which torch may not hold.
        values = np.require(values, requirements=["C", "W"])
        return torch.from_numpy(values.reshape(1, *values.shape) if len(index) > 2 else values)

    def read_packed(self, index: Index) -> Tensor:
        """See `PackedSource`. Of three dimensions, the rows of one expert."""
        from .ggml_types import TYPES

        packing, split = TYPES[self.tensor.type_id]
        raw = self._in_our_order(self._rows(index))
        if split is None:
            return self._rearranged(raw, index[-1], packing)
        packed = torch.empty(len(raw), packing.row_bytes(index[-1].stop - index[-1].start), dtype=torch.uint8)
        step = max(1, _AT_ONCE // self.shape[-1])
        for start in range(0, len(raw), step):
            rows = np.require(raw[start : start + step], requirements=["C", "W"])
            scales, least, nested, codes = split(torch.from_numpy(rows).view(-1, self._block[1]))
            own = partial(self._columns, num_rows=len(rows), columns=index[-1])
            least = None if least is None else own(least)
            parts = Parts(own(scales), least, tuple(own(part) for part in nested), own(codes))
            packed[start : start + step] = assemble(packing, parts)
        return packed

    def _columns(self, part: Tensor, num_rows: int, columns: slice) -> Tensor:
        """Of what blocks have for each number, or each few of them: [num_rows, those of some columns]."""
        of_rows = part.view(num_rows, -1)
        each = self.shape[-1] // of_rows.shape[1]
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
        """[num_rows, row_bytes], as they lie in the file. A vector is one; of three dimensions, the first has one."""
        block_size, block_bytes = self._block
        row_bytes = self.shape[-1] // block_size * block_bytes
        first, last = (index[-2].start, index[-2].stop) if len(index) > 1 else (0, 1)
        if len(index) > 2:
            before = index[0].start * self.shape[1]
            first, last = before + first, before + last
        start, stop = self.tensor.offset + first * row_bytes, self.tensor.offset + last * row_bytes
        return self.data[start:stop].reshape(last - first, row_bytes)

    def _in_our_order(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.head_dim is None:
            return rows
        return rows.reshape(-1, self.head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@contextmanager
def open_gguf(path: Path, config: HFConfig) -> Iterator[dict[str, TensorSource]]:
    """The tensors of a GGUF file by the names of a checkpoint. Raises `ConfigError` when the file is cut short."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    file = read_gguf(path)
    architecture, family = file.metadata.get("general.architecture"), family_of(config)[1]
    names = _checkpoint_names(architecture, config["num_hidden_layers"], family)
    parts = {each: np.memmap(each, dtype=np.uint8, mode="r") for each in {t.path for t in file.tensors.values()}}
    sources: dict[str, TensorSource] = {}
    for tensor in file.tensors.values():
        data = parts[tensor.path]
        try:
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
        except ValueError as error:
            raise ConfigError(
                f"model: {tensor.path} holds {tensor.name} in an unknown type ({tensor.type_id})."
            ) from error
        end = tensor.offset + int(np.prod(tensor.shape)) // block_size * block_bytes
        if end > len(data):
            raise ConfigError(
                f"model: {tensor.path} is cut short: it has {len(data)} bytes, {tensor.name} needs {end}."
            )
        if tensor.name in _OF_POSITIONS:
            continue
        module, _, kind = tensor.name.rpartition(".")
        interleaved = architecture in _INTERLEAVED and module.endswith((".attn_q", ".attn_k"))
        added = 1.0 if architecture in _NORMS_PLUS_ONE and module.endswith("norm") else 0.0
        name = f"{names[module]}.{kind}" if module in names else tensor.name
        source = _GGUFSource(data, tensor, config["head_dim"] if interleaved else None, added)
        sources[name] = turned(source) if architecture in _TURNED and len(tensor.shape) > 2 else source
    yield sources


def _checkpoint_names(architecture: Any, num_layers: int, family: Family) -> dict[str, str]:
    """What modules in a GGUF file are called in a checkpoint of this family: of all names that the `gguf` package
    translates into one, the one that has a place (the longest: a prefix may be left out)."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (known,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    mapping = get_tensor_name_map(known, num_layers).mapping
    placed = sorted((name for name in mapping if family.place(f"{name}.weight") is not None), key=len)
    return {mapping[name][1]: name for name in placed}
