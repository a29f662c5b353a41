"""One step of the sampler, from the rows of a table to their tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.sampling import Draws
from quire.workers.sampler import SamplerOutput, SamplingRows, sample

NO_TOKENS = np.zeros((1, 1), np.int32)


def sampled(
    rows: SamplingRows,
    logits: torch.Tensor,
    order: npt.ArrayLike,
    positions: npt.ArrayLike,
    tokens: npt.NDArray[np.int32] = NO_TOKENS,
) -> SamplerOutput:
    """Row `order[i]` samples from `logits[i]` the token at `positions[i]`, after the first ones of its `tokens`."""
    indices, places = np.asarray(order, np.int32), np.asarray(positions, np.int32)
    draws = rows.draws(indices, places)
    on_device = None if draws is None else Draws(*map(torch.from_numpy, draws))
    return sample(logits, on_device, rows.gather(indices, places, tokens))
