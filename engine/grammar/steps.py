"""What grammars do to a step: the masks that go with it, and what they say to the tokens that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import EngineError, QuireError
from ..outputs import GrammarMasks

if TYPE_CHECKING:
    from ..request import Request


@dataclass(frozen=True, slots=True)
class Verdicts:
    """About the constrained rows of a step, by their index in the batch."""

    ends: set[int] = field(default_factory=set)  # nothing may follow this token
    rejected: list[int] = field(default_factory=list)  # another token has to be sampled
    errors: dict[int, QuireError] = field(default_factory=dict)  # the request cannot go on

    @property
    def objections(self) -> list[int]:
        """Whose token is not taken."""
        return [*self.rejected, *self.errors]


_NONE = Verdicts()


def gather_masks(requests: Sequence[Request | None], indices: npt.NDArray[np.intp]) -> GrammarMasks | None:
    """The masks of the constrained requests at these indices of the batch, which sample in the step."""
    if not indices.size:
        return None
    constraints = [request.constraint for i in indices.tolist() if (request := requests[i]) is not None]
    allowed = [constraint.allowed for constraint in constraints if constraint is not None]
    if not allowed:
        return None
    return GrammarMasks(indices=indices.astype(np.int32), allowed=np.stack(allowed))


def hold_to_grammars(
    requests: Sequence[Request | None], indices: npt.NDArray[np.intp], token_ids: Sequence[int]
) -> Verdicts:
    """Show each constrained request at these indices of the batch the token that was sampled for it."""
    if not indices.size:
        return _NONE
    verdicts = Verdicts()
    for index in indices.tolist():
        request = requests[index]
        if request is None or request.constraint is None:
            continue
        try:
            if not request.constraint.accept(token_ids[index], request.num_tokens_left - 1):
                verdicts.rejected.append(index)
            elif request.constraint.is_complete:
                verdicts.ends.add(index)
        except QuireError as error:
            verdicts.errors[index] = error
        except Exception as error:  # whatever a matcher does, it is this request's own
            verdicts.errors[index] = EngineError(f"The grammar failed ({error}).")
    return verdicts
