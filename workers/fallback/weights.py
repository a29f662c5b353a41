"""Fills a model of `transformers` from a checkpoint: every weight exactly once, under the names of its own loader.

`transformers` renames and converts the tensors of a checkpoint when it loads them (experts become one tensor, fused
ones are split). Its rules are used as they are: for the names alone first, and on tensors of the meta device, so that
everything that does not fit is known before anything is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from quire.engine.model_source import ModelInfo

from ..layers.parameter import TensorSource, whole
from ..loader.checkpoint import may_be_left_over, open_checkpoint, strange_type
from ..loader.kv_scales import is_kv_scale
from ..loader.load import Faults, run_all


@dataclass(slots=True)
class _Filling:
    """Checkpoint tensors that together fill one weight of the model, or several."""

    target: str  # the first of the weights
    converter: WeightConverter | None = None  # None: one tensor, as it is
    parts: list[tuple[str, str, TensorSource]] = field(default_factory=list)  # (pattern, name, tensor)

    def convert(self, model: Any, read: Callable[[TensorSource], Tensor]) -> dict[str, Tensor]:
        """The weights by name."""
        if self.converter is None:
            return {self.target: read(self.parts[0][2])}
        converter = copy.deepcopy(self.converter)
        for pattern, name, source in self.parts:
            converter.add_tensor(self.target, name, pattern, read(source))  # type: ignore[arg-type]  # or a tensor
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def load_fallback_weights(model: Any, info: ModelInfo, *, progress: bool) -> None:
    """Read a checkpoint into `model`. Raises `ConfigError` naming every tensor that does not match."""
    with open_checkpoint(info) as sources:
        fillings = _plan(model, sources, info)
        weights = model.state_dict()

        def fill(filling: _Filling) -> None:
            for name, value in filling.convert(model, _read).items():
                weights[name].copy_(value)

        run_all(fill, fillings, info, progress=progress)


def check_fallback_weights(model: Any, info: ModelInfo) -> None:
    """Raise what `load_fallback_weights` would, without reading a tensor. `model` may be on the meta device."""
    with open_checkpoint(info) as sources:
        _plan(model, sources, info)


def _read(source: TensorSource) -> Tensor:
    return source.read(whole(source.shape))


def _on_meta(source: TensorSource) -> Tensor:
    return torch.empty(source.shape, device="meta")


def _plan(model: Any, sources: Mapping[str, TensorSource], info: ModelInfo) -> list[_Filling]:
    """Which tensors fill which weights. Raises `ConfigError` unless every weight is filled and every tensor is used."""
    faults = Faults()
    fillings = _assign(model, sources, faults)
    weights = model.state_dict()
    filled: dict[str, _Filling] = {}
    for filling in fillings.values():
        for name, shape in _shapes(filling, model, faults).items():
            if name not in weights:
                faults.unexpected.append(name)
            elif tuple(weights[name].shape) != shape:
                faults.misshapen.append(f"{name} {list(shape)} instead of {list(weights[name].shape)}")
            filled[name] = filling
    optional = model._keys_to_ignore_on_load_missing or ()
    one_of = _tied(model)
    faults.missing = [
        name
        for name in weights
        if filled.keys().isdisjoint(one_of.get(name, {name})) and not any(re.search(p, name) for p in optional)
    ]
    faults.raise_any(info)
    # Of tied weights that a checkpoint holds all the same, the first is read.
    skipped = {other for names in one_of.values() for other in sorted(names & filled.keys())[1:]}
    return [filling for name, filling in fillings.items() if name not in skipped]


def _assign(model: Any, sources: Mapping[str, TensorSource], faults: Faults) -> dict[str, _Filling]:
    """Names only: what `transformers` would fill with each tensor."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    weights, prefix = model.state_dict(), model.base_model_prefix
    fillings: dict[str, _Filling] = {}
    for name in sorted(sources, key=dot_natural_key):
        if is_kv_scale(name):
            continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights:  # it may have the right name already
            target, pattern = rename_source_key(name, [], [], prefix, weights)
        if target not in weights:
            known = may_be_left_over(sources[name]) or any(re.search(ignored, name) for ignored in _ignored(model))
            if not known:
                faults.unexpected.append(name)
            continue
        filling = fillings.setdefault(target, _Filling(target, None if pattern is None else of_pattern[pattern]))
        if filling.parts and filling.converter is None:
            faults.unexpected.append(name)
            continue
        stored_as = strange_type(sources[name])
        if stored_as is not None and weights[target].is_floating_point():
            faults.mistyped.append(f"{name} ({stored_as})")
        filling.parts.append((pattern or name, name, sources[name]))
    return fillings


def _shapes(filling: _Filling, model: Any, faults: Faults) -> dict[str, tuple[int, ...]]:
    """The weights that a filling makes."""
    try:
        return {name: tuple(value.shape) for name, value in filling.convert(model, _on_meta).items()}
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        given = ", ".join(f"{name} {list(source.shape)}" for _, name, source in filling.parts)
        faults.misshapen.append(f"{given} cannot become {filling.target} ({str(error).splitlines()[0]})")
        return {filling.target: tuple(model.state_dict()[filling.target].shape)}


def _ignored(model: Any) -> Iterator[str]:
    """Names that `transformers` knows to be of no use: its own lists, and buffers of old checkpoints."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    yield r"rotary_emb\.inv_freq$"
    yield r"(^|\.)position_ids$"


def _tied(model: Any) -> dict[str, set[str]]:
    """Names of one and the same parameter, by each of them."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {name: same for same in names.values() for name in same if len(same) > 1}
