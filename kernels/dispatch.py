"""Which backend runs an operation: decided once per kind of device, logged, and the same for every operation."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .elementwise import HeadNorms, Rotation
    from .ops import AttentionMetadata, ExpertMatrices
    from .packed import Packing
    from .sampling import Draws

logger = logging.getLogger(__name__)

LARGEST_GPU_HEAD = 256  # numbers of a head of attention: larger ones do not fit into the shared memory of a GPU
BACKENDS = {
    "reference": "quire.kernels.reference",
    "cpu": "quire.kernels.cpu",
    "triton": "quire.kernels.triton",
}


class Backend(Protocol):
    """The functions of a backend's package. `ops`, `elementwise`, `sampling` and `tokens` checked the arguments, and
    say what they mean.

    What writes to a cache in 8 bits gets it as bytes, and stores keys and values as `fp8.stored` does. Scales are of
    such caches only.
    """

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: float,
        value_scale: float,
    ) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        key_scale: float,
        value_scale: float,
    ) -> Tensor: ...

    def angles(self, positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, multiplier: float
    ) -> tuple[Tensor, Tensor]: ...

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor: ...

    def rotate(self, heads: Tensor, rotation: Rotation) -> None: ...

    def rotate_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: Rotation,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: float,
        value_scale: float,
        norms: HeadNorms | None,
    ) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_int8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, in_int8: bool) -> Tensor: ...

    def pays_in_int8(self, shape: tuple[int, int], dtype: torch.dtype) -> bool: ...

    def linear_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_packed(
        self, x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, out_dtype: torch.dtype, in_int8: bool
    ) -> Tensor: ...

    def linear_gated_packed(
        self, x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, activation: str, in_int8: bool
    ) -> Tensor: ...

    def bounds_packed(self, packing: Packing, dtype: torch.dtype) -> bool: ...

    def likeliest_packed(self, x: Tensor, weight: Tensor, packing: Packing, lengths: Tensor) -> Tensor: ...

    def lay_out_packed(self, rows: Tensor, packing: Packing, dtype: torch.dtype, in_int8: bool) -> Tensor: ...

    def look_up_packed(self, token_ids: Tensor, rows: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor: ...

    def looks_up_packed(self, dtype: torch.dtype) -> bool: ...

    def fits_packed(self, shape: tuple[int, int], packing: Packing, dtype: torch.dtype, in_int8: bool) -> bool: ...

    def choose_experts(
        self, logits: Tensor, experts_per_token: int, *, renormalize: bool, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        routing: Tensor,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        *,
        activation: str,
        num_experts_in_all: int | None,
    ) -> Tensor: ...

    def exclude_tokens(self, logits: Tensor, indices: Tensor, allowed: Tensor) -> None: ...

    def likeliest_tokens(self, logits: Tensor) -> Tensor: ...

    def draw_tokens(self, logits: Tensor, draws: Draws) -> Tensor: ...

    def resolve_tokens(self, token_ids: Tensor, last_token_ids: Tensor) -> Tensor: ...

    def keep_tokens(self, last_token_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None: ...


_forced: list[str] = []  # tests only: the innermost `forced_backend` is the last


def backend_for(device: torch.device) -> Backend:
    """The backend of a device. A GPU without Triton is an error, never a silent fall to something slow."""
    if _forced:
        return _load(_forced[-1])
    return _decide(device.type)


@contextmanager
def forced_backend(name: str) -> Iterator[None]:
    """Tests only: every operation inside runs on backend `name`, whatever the device."""
    if name not in BACKENDS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _decide(device_type: str) -> Backend:
    name = {"cpu": "cpu", "cuda": "triton"}.get(device_type, "reference")
    logger.info("kernel backend for %s: %s", device_type, name)
    return _load(name)


@cache
def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[name]))
