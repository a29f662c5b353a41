"""CPU backend."""

from .attention import paged_attention
from .cache import write_kv
from .linear import linear, linear_fp8, linear_int8
from .moe import experts

__all__ = ["experts", "linear", "linear_fp8", "linear_int8", "paged_attention", "write_kv"]
