"""What a family is: how its configuration becomes a `DecoderSpec`, and where the tensors of its checkpoints go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.errors import ConfigError

from ..spec import WHOLE, DecoderSpec

HFConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tensors of one checkpoint module go.

    `{0}` and `{1}` in the names stand for the first and second number in the checkpoint's name (the layer, the expert).
    Several pieces lie below each other in one tensor; where they are `per_kv_head`, that repeats for every KV head:

        stacked:       q q q q k k v v           per KV head:   q q k v | q q k v

    Where `stacked`, one tensor [experts, rows, columns] holds the pieces of every expert; of biases, [experts, rows].
    """

    module: str  # of ours
    pieces: tuple[str, ...] = (WHOLE,)
    per_kv_head: bool = False
    transposed: bool = False  # weights are [in, out]
    stacked: bool = False
    interleaved: bool = False  # rows of its pieces take turns
    kind: str = ""  # weight or bias, where the name does not end with it

    def numbered(self, numbers: list[str]) -> Place:
        return replace(
            self, module=self.module.format(*numbers), pieces=tuple(piece.format(*numbers) for piece in self.pieces)
        )

    def pieces_of(self, num_experts: int) -> list[str]:
        """The pieces in one tensor, in order."""
        if not self.stacked:
            return list(self.pieces)
        return [f"{piece}.{expert}" for expert in range(num_experts) for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    `spec` is given the configuration over `defaults`, and `max_model_len`. `modules` maps the names of checkpoint
    modules (or of tensors that are no module's weight or bias), with `{}` for numbers. `prefix` begins all names but
    those of checkpoints saved without the head. Tensors that match `ignored` are known to be of no use.
    """

    spec: Callable[[HFConfig, int], DecoderSpec]
    modules: Mapping[str, Place]
    prefix: str = "model."
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def decoder_spec(self, config: HFConfig, max_model_len: int) -> DecoderSpec:
        """Raises `ConfigError` when the configuration asks for something that is not supported."""
        given = {key: value for key, value in config.items() if value is not None}
        try:
            return self.spec({**self.defaults, **given}, max_model_len)
        except KeyError as error:
            raise ConfigError(f"model: the configuration does not say {error.args[0]}.") from error
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ConfigError(f"model: the configuration holds something that cannot be ({error}).") from error

    def place(self, name: str) -> tuple[Place, str] | None:
        """Where a checkpoint tensor goes, and its kind (weight or bias). None when it has no place."""
        module, _, kind = name.rpartition(".")
        for whole_name, its_kind in ((module, kind), (name, "weight")):
            numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", whole_name)
            generic = re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", whole_name)
            place = self.modules.get(generic) or self.modules.get(self.prefix + generic)
            if place is not None:
                return place.numbered(numbers), place.kind or its_kind
        return None

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def name_map(top: Mapping[str, str], layers: str, layer: Mapping[str, Place]) -> dict[str, Place]:
    """The whole map from the modules outside the layers, the name of the list of layers, and the modules of a layer."""
    inside = {
        f"{layers}.{{}}.{name}": replace(place, module=f"layers.{{0}}.{place.module}") for name, place in layer.items()
    }
    return {name: Place(module) for name, module in top.items()} | inside
