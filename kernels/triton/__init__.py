"""Triton kernels for GPUs. Importing this package imports triton; nothing else of `quire.kernels` does."""
