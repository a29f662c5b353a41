"""Sampling: `SamplingRows` keeps the parameters by row, `sample` turns logits into tokens."""

from .batch import SamplingBatch, SamplingRows, TokenMasks
from .sampler import SamplerOutput, sample

__all__ = ["SamplerOutput", "SamplingBatch", "SamplingRows", "TokenMasks", "sample"]
