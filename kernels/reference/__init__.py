"""Float32 torch references: the plainest code that says what each operation means. Slow, and read before the others."""

from .attention import paged_attention, write_kv

__all__ = ["paged_attention", "write_kv"]
