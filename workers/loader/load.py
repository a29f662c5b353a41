"""Fills a model from a checkpoint: every piece of every parameter exactly once."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo
from quire.kernels.packed import Packing

from ..layers.parameter import ShardedParameter, TensorSource
from ..models.decoder import Decoder
from ..models.families import Family, Place
from ..models.model import Model
from ..models.spec import DecoderSpec
from ..parallel import ParallelContext
from .checkpoint import may_be_left_over, open_checkpoint, strange_type
from .kv_scales import is_kv_scale
from .views import OfExpert, RowsOfGroups, Transposed, turned

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAMES_SHOWN = 5
_DUMMY_STD = 0.02


def load_weights(model: Decoder, family: Family, info: ModelInfo, *, progress: bool) -> None:
    """Read this rank's share of a checkpoint into `model`, with a progress bar if standard error is a terminal.

    Raises `ConfigError` naming every tensor that is missing, unexpected or wrongly shaped, before anything is read, or
    one that cannot be quantized. The checkpoint is held against the whole model, so that every rank finds the same
    faults.
    """
    with torch.device("meta"):
        whole = Decoder(model.spec, ParallelContext())
    with open_checkpoint(info) as sources:
        plan = _plan(whole, family, sources, info)
        own = [
            (name, parameter, piece, plan[name, piece])
            for name, parameter in _parameters(model).items()
            for piece in parameter.pieces
        ]

        def load(item: tuple[str, ShardedParameter, str, TensorSource]) -> None:
            name, parameter, piece, source = item
            try:
                parameter.weight_loader(source, piece)
            except ValueError as error:  # of what it is packed as
                raise ConfigError(f"quantization: {_title(name, piece)} in {info.path} has {error}.") from error

        run_all(load, own, info, progress=progress)


class StoredAs(NamedTuple):
    """How a file has a matrix, where kernels know it."""

    packing: Packing | None  # in which it is packed
    eight_bits: torch.dtype | None  # with a scale per row,
    scale_columns: int | None  # or for so many columns of it


def how_stored(model: Decoder, family: Family, info: ModelInfo) -> dict[tuple[str, str], StoredAs]:
    """Of each (parameter, piece). Raises like `load_weights`. `model` is whole, perhaps on the meta device."""
    with open_checkpoint(info) as sources:
        plan = _plan(model, family, sources, info)
        return {
            filled: StoredAs(*(getattr(source, each, None) for each in StoredAs._fields))
            for filled, source in plan.items()
        }


def check_weights(model: Decoder, family: Family, info: ModelInfo) -> None:
    """Raise what `load_weights` would, without reading any tensor. `model` is whole, perhaps on the meta device."""
    with open_checkpoint(info) as sources:
        _plan(model, family, sources, info)


def load_dummy(model: Model, seed: int = 0) -> None:
    """Random weights of the right shapes, for benchmarks: small enough that activations stay finite.

    What several ranks hold whole is the same on all of them.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data.fill_(1.0)
        else:
            # On the device itself: a processor would take minutes for the numbers of a large model.
            generator = torch.Generator(parameter.device).manual_seed(seed + zlib.crc32(name.encode()))
            shape = parameter.matrix_shape if isinstance(parameter, ShardedParameter) else parameter.shape
            values = torch.empty(shape, dtype=torch.float32, device=parameter.device)
            values.normal_(0.0, _DUMMY_STD, generator=generator)
            if isinstance(parameter, ShardedParameter):
                parameter.fill(values)
            else:
                parameter.data.copy_(values)


def _parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """By name; tied ones once."""
    parameters = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedParameter), name
        parameters[name] = parameter
    return parameters


def run_all(load: Callable[[T], None], items: Sequence[T], info: ModelInfo, *, progress: bool) -> None:
    """Load every item, on several threads, with a progress bar if standard error is a terminal."""
    started = time.monotonic()
    console = Console(stderr=True)
    hidden = not progress or not console.is_terminal
    # Reading and dequantizing leave the interpreter's lock for most of their time.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        loaded = pool.map(load, items)
        for _ in track(loaded, "Loading weights", total=len(items), transient=True, console=console, disable=hidden):
            pass
    logger.info("loaded %d tensors of %s in %.1f s", len(items), info.name, time.monotonic() - started)


@dataclass(slots=True)
class Faults:
    """What does not match between a checkpoint and a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)

    def raise_any(self, info: ModelInfo) -> None:
        """Raise one `ConfigError` about all of them."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "wrong shape": self.misshapen}
        kinds["not in float32, bfloat16 or float16"] = self.mistyped
        if any(kinds.values()):
            listed = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
            raise ConfigError(f"model: the weights in {info.path} do not fit its configuration. {listed}.")


def _plan(
    model: Decoder, family: Family, sources: Mapping[str, TensorSource], info: ModelInfo
) -> dict[tuple[str, str], TensorSource]:
    """Which tensor fills which (parameter, piece) of a whole model. Raises `ConfigError` unless all match."""
    # Tied weights appear once among the named parameters; a head that a checkpoint stores all the same has no place.
    parameters = _parameters(model)
    tied_head = "head.weight" not in parameters
    wanted = {(name, piece) for name, parameter in parameters.items() for piece in parameter.pieces}
    plan: dict[tuple[str, str], TensorSource] = {}
    faults = Faults()
    for name, source in sources.items():
        found = family.place(name)
        if is_kv_scale(name) or family.ignores(name) or (tied_head and found is not None and found[0].module == "head"):
            continue
        place, kind = found or (Place(""), "")
        target = f"{place.module}.{kind}"
        num_experts = parameters[target].shape[0] if place.stacked and target in parameters else 1
        filled = [(target, piece) for piece in place.pieces_of(num_experts)]
        if any(piece not in wanted or piece in plan for piece in filled):
            if not may_be_left_over(source):
                faults.unexpected.append(name)
            continue
        stored_as = strange_type(source)
        if stored_as is not None:
            faults.mistyped.append(f"{name} ({stored_as})")
        pieces = parameters[target].pieces
        shapes = [pieces[piece].shape for _, piece in filled]
        shape = _shape_in_file(place, shapes, num_experts)
        views = _views(source, place, shapes, model.spec, num_experts) if source.shape == shape else None
        if views is None:
            faults.misshapen.append(f"{name} {list(source.shape)} instead of {list(shape)}")
        plan.update(zip(filled, views or [source] * len(filled), strict=True))
    faults.missing = [_title(name, piece) for name, piece in sorted(wanted - plan.keys())]
    faults.raise_any(info)
    return plan


def _title(name: str, piece: str) -> str:
    return f"{name} ({piece})" if piece else name


def _shape_in_file(place: Place, shapes: list[tuple[int, ...]], num_experts: int) -> tuple[int, ...]:
    """The shape of a tensor that holds pieces of these shapes below each other, or expert after expert."""
    shape = (sum(shape[0] for shape in shapes) // num_experts, *shapes[0][1:])
    shape = shape[::-1] if place.transposed else shape
    return (num_experts, *shape) if place.stacked else shape


def _views(
    source: TensorSource, place: Place, shapes: list[tuple[int, ...]], spec: DecoderSpec, num_experts: int
) -> list[TensorSource]:
    """The pieces of a checkpoint tensor, which has the shape that they have together."""
    if place.stacked:
        source = turned(source) if place.transposed and len(source.shape) > 2 else source
        count = len(place.pieces)
        ends = list(itertools.accumulate(shape[0] for shape in shapes[:count]))
        rows = [range(end - shape[0], end) for shape, end in zip(shapes, ends, strict=False)]
        if place.interleaved:
            rows = [range(i, ends[-1], count) for i in range(count)]
        return [OfExpert(source, expert, part) for expert in range(num_experts) for part in rows]
    if place.transposed:
        source = Transposed(source)
    if len(shapes) == 1:
        return [source]
    # The KV heads of a model are the same in all layers.
    num_groups = spec.layers[0].attention.num_kv_heads if place.per_kv_head else 1
    sizes = [shape[0] // num_groups for shape in shapes]
    ends = list(itertools.accumulate(sizes))
    return [RowsOfGroups(source, ends[-1], range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
