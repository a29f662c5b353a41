"""Tensors of a Hugging Face directory, read by slice so that a rank touches only its share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.engine.errors import ConfigError

from ..layers.parameter import Index, TensorSource

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    file: Any  # an open safetensors file
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def stored_as(self) -> str:
        """In the words of the format: F32, BF16, I8, F8_E4M3, ..."""
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self, index: Index) -> Tensor:
        part: Tensor = self.file.get_slice(self.name)[index]
        return part


@contextmanager
def open_safetensors(directory: Path) -> Iterator[dict[str, TensorSource]]:
    """The tensors of a directory by name; the files stay open inside. Raises `ConfigError` when one is damaged."""
    with ExitStack() as stack:
        sources: dict[str, TensorSource] = {}
        for path, names in _files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"model: {path} is not a readable safetensors file ({error}).") from error
            stored = set(file.keys())
            for name in sorted(stored) if names is None else names:
                if name not in stored:
                    raise ConfigError(f"model: {path} has no tensor {name}, which {_INDEX} places there.")
                sources[name] = SafetensorsSource(file, name)
        yield sources


def _files(directory: Path) -> list[tuple[Path, list[str] | None]]:
    """The files of a checkpoint and the tensors that the index places in each (None: all that it holds)."""
    index = directory / _INDEX
    if index.is_file():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {index} cannot be read ({error}).") from error
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError(f"model: {index} has no weight_map from tensor names to file names.")
        names: dict[str, list[str]] = {}
        for name, file_name in weight_map.items():
            names.setdefault(file_name, []).append(name)
        return [(directory / file_name, tensors) for file_name, tensors in sorted(names.items())]
    if (directory / _SINGLE).is_file():
        return [(directory / _SINGLE, None)]
    raise ConfigError(f"model: {directory} has neither {_SINGLE} nor {_INDEX}.")
