"""Float32 torch references: the plainest code that says what each operation means. Slow, and read before the others."""

from .attention import paged_attention, write_kv
from .linear import linear, linear_int8

__all__ = ["linear", "linear_int8", "paged_attention", "write_kv"]
