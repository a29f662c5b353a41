"""CPU backend."""

from .attention import paged_attention
from .cache import write_kv
from .linear import linear, linear_int8

__all__ = ["linear", "linear_int8", "paged_attention", "write_kv"]
