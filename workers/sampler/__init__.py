"""Sampling: `SamplingRows` keeps the parameters by row, `sample` turns logits into tokens."""

from .batch import SamplingBatch, SamplingRows, TokenMasks
from .logprobs import SampledScores
from .sampler import SamplerOutput, sample

__all__ = ["SampledScores", "SamplerOutput", "SamplingBatch", "SamplingRows", "TokenMasks", "sample"]
