"""GPU backend. Importing this package imports triton; nothing else of `quire.kernels` does."""

from .attention import paged_attention
from .cache import write_kv

__all__ = ["paged_attention", "write_kv"]
