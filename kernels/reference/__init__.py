"""Float32 torch references: the plainest code that says what each operation means. Slow, and read before the others."""

from .attention import paged_attention, write_kv
from .elementwise import activate_and_mul, add_rms_norm, angles, rms_norm, rotate, rotate_and_write_kv
from .linear import (
    bounds_packed,
    fits_packed,
    lay_out_packed,
    likeliest_packed,
    linear,
    linear_fp8,
    linear_gated_packed,
    linear_int8,
    linear_packed,
    look_up_packed,
    looks_up_packed,
    pays_in_int8,
)
from .moe import choose_experts, experts
from .sampling import draw_tokens, exclude_tokens, likeliest_tokens
from .tokens import keep_tokens, resolve_tokens

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
