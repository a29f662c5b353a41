"""How the hidden states of a prompt become one vector."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from .errors import InvalidRequestError

PoolingType = Literal["last", "mean", "cls"]
POOLING_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An embedding instead of an answer, from the hidden states after the model's last norm.

    `type`: that of the last token, of the first (`cls`), or the mean over the prompt. `dimensions` keeps so many of the
    first components (None: all), and `normalize` then divides by the Euclidean norm. Raises `InvalidRequestError`.
    """

    type: PoolingType = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.type not in POOLING_TYPES:
            raise InvalidRequestError(
                f"pooling: must be one of {', '.join(POOLING_TYPES)}, got {self.type!r}.", "pooling"
            )
        if not isinstance(self.normalize, bool):
            raise InvalidRequestError(f"normalize: must be true or false, got {self.normalize!r}.", "normalize")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequestError(f"dimensions: must be an integer >= 1, got {self.dimensions!r}.", "dimensions")

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a prefix in the cache, whose hidden states are gone, is of no use."""
        return self.type != "last"
