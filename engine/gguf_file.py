"""The directory of a GGUF file: metadata and where each tensor lies. Tensor data is not touched here.

The `gguf` package's own reader spends 3.6 s on the default model (several arrays per string of the vocabulary), this
one a tenth of a second, and every gateway and every rank pays it at start. Dequantization is left to `gguf`.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).

A model may be cut into several files, as llama.cpp's `gguf-split` does: `name-00001-of-00003.gguf`, which has the
metadata, and so on. What is read of the first one is the whole.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from .errors import ConfigError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, of those that matter here."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# What bytes that mean something else lead to: lengths beyond the file, kinds that nobody knows, a text for a number.
_DAMAGED = (struct.error, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
_MAX_DIMS = 4
_PART = re.compile(r"(?P<name>.*)-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in PyTorch's order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml's tensor type: 0 is F32, 1 F16, 30 BF16; the others are quantized
    path: Path  # of the file that it lies in
    offset: int  # bytes from the start of that


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file without its tensor data, with what lies in further parts of it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def floats(self, name: str, count: int) -> list[float]:
        """A vector of so many numbers in float32. Raises `ValueError` when the tensor is something else."""
        tensor = self.tensors[name]
        if tensor.type_id != 0 or tensor.shape != (count,):
            raise ValueError(f"it is no vector of {count} numbers in float32")
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(4 * count)
        if len(data) < 4 * count:
            raise ValueError("the file ends before it does")
        return list(struct.unpack(f"<{count}f", data))


def read_gguf(path: Path) -> GGUFFile:
    """Read the directory of a GGUF file, or of all parts, of which this is the first. Raises `ConfigError` when it is
    not one or is damaged, or a part is missing."""
    first = _read_one(path)
    num_parts, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    if number != 0:
        raise ConfigError(f"model: {path} is part {number + 1} of {num_parts}; give the first.")
    tensors = dict(first.tensors)
    for i in range(1, num_parts):
        named = _PART.fullmatch(path.name)
        if named is None:
            raise ConfigError(
                f"model: {path} has {num_parts} parts, and its name is not NAME-00001-of-{num_parts:05}.gguf."
            )
        part = _read_one(path.with_name(f"{named['name']}-{i + 1:05}-of-{num_parts:05}.gguf"))
        if part.metadata.get("split.no") != i or part.metadata.get("split.count") != num_parts:
            raise ConfigError(f"model: {part.path} is not part {i + 1} of {num_parts}, as its name says.")
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ConfigError(f"model: the parts of {path} have {len(tensors)} tensors instead of {expected}.")
    return GGUFFile(path, first.metadata, tensors)


def _read_one(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data, path).parse()
    except _DAMAGED as error:
        raise ConfigError(f"model: {path} is not a readable GGUF file ({error}).") from error
    except OSError as error:
        raise ConfigError(f"model: {path} cannot be read ({error.strerror}).") from error


class _Parser:
    """A cursor over the bytes of one file. Reading past the end raises `struct.error` or `ValueError`."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._pos = 0

    def parse(self) -> GGUFFile:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        self._pos = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are known")
        num_tensors, num_entries = self._scalar(10), self._scalar(10)
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar(4))
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = (self._pos + alignment - 1) // alignment * alignment
        if any(start + tensor.offset >= len(self._data) for tensor in tensors):
            raise ValueError(f"it ends at byte {len(self._data)}, before its last tensor begins")
        placed = {tensor.name: replace(tensor, offset=start + tensor.offset) for tensor in tensors}
        return GGUFFile(self._path, metadata, placed)

    def _scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        (value,) = struct.unpack_from(layout, self._data, self._pos)
        self._pos += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """The vocabulary and the merges: 100,000 strings, so this loop is the cost of reading a file."""
        data, pos, unpack = self._data, self._pos, struct.Struct("<Q").unpack_from
        end = len(data)
        strings = []
        for _ in range(count):
            (length,) = unpack(data, pos)
            pos += 8 + length
            if pos > end:
                raise ValueError(f"a string of {length} bytes passes the end of the file")
            strings.append(data[pos - length : pos].decode("utf-8", "replace"))
        self._pos = pos
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        item, count = self._scalar(4), self._scalar(10)
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        layout = f"<{count}{_SCALARS[item][1]}"
        values = struct.unpack_from(layout, self._data, self._pos)
        self._pos += struct.calcsize(layout)
        return list(values)

    def _tensor(self) -> GGUFTensor:
        name, num_dims = self._string(), self._scalar(4)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar(10) for _ in range(num_dims))[::-1]
        type_id, offset = self._scalar(4), self._scalar(10)
        return GGUFTensor(name, shape, type_id, self._path, offset)
