"""GPU backend. Importing this package imports triton; nothing else of `quire.kernels` does."""

from ..reference.elementwise import angles  # by torch's operators, once per step
from ..reference.tokens import keep_tokens, resolve_tokens  # likewise
from .attention import paged_attention
from .cache import write_kv
from .elementwise import activate_and_mul, add_rms_norm, rms_norm, rotate, rotate_and_write_kv
from .linear import linear, linear_fp8, linear_int8, pays_in_int8
from .moe import choose_experts, experts
from .packed import (
    bounds_packed,
    fits_packed,
    lay_out_packed,
    likeliest_packed,
    linear_gated_packed,
    linear_packed,
    look_up_packed,
    looks_up_packed,
)
from .sampling import draw_tokens, exclude_tokens, likeliest_tokens

__all__ = [
    "activate_and_mul",
    "add_rms_norm",
    "angles",
    "bounds_packed",
    "choose_experts",
    "draw_tokens",
    "exclude_tokens",
    "experts",
    "fits_packed",
    "keep_tokens",
    "lay_out_packed",
    "likeliest_packed",
    "likeliest_tokens",
    "linear",
    "linear_fp8",
    "linear_gated_packed",
    "linear_int8",
    "linear_packed",
    "look_up_packed",
    "looks_up_packed",
    "paged_attention",
    "pays_in_int8",
    "resolve_tokens",
    "rms_norm",
    "rotate",
    "rotate_and_write_kv",
    "write_kv",
]
