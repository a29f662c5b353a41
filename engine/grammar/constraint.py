"""One request held to its grammar: what may come next, and how it could be brought to its end from here.

**Why an answer always closes.** At every moment a completion is known that fits into the tokens that are left
(`_completion`); at the start it is the grammar's shortest, or the request is refused. A sampled token is taken only if
afterwards there is such a completion again. If not, it is given back and sampled once more, and then only the known
completion's next token is allowed, as it is when that needs every token that is left. So the search for completions
may be as greedy as it likes: it decides how late an answer is steered, not whether it ends in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EngineError, InvalidRequestError
from ..outputs import IntArray
from .other_fields import OtherFields, set_bits

if TYPE_CHECKING:
    from ..outputs import EngineRequest
    from .compiler import Grammar
    from .completion import Completion

_MAX_WALK_STEPS = 2000  # after a token: 50 ms or so at the most, and nearly always less than one
_MAX_IMPROVE_STEPS = 500  # where the walk does not fit


class Constraint:
    """Owned by a `Request`; used by the engine's thread. `num_left` counts the tokens that may still come.

    It follows from the request and its output tokens alone, so any engine rebuilds it by `replay`.
    """

    def __init__(self, grammar: Grammar, source: EngineRequest, num_left: int) -> None:
        """Raises `InvalidRequestError` when not even the shortest answer fits."""
        if not grammar.shortest.fits(num_left):
            needed = grammar.shortest.num_tokens
            raise InvalidRequestError(
                f"max_tokens: {num_left} tokens are left for the answer, but the shortest one that "
                f"{source.grammar.param if source.grammar else 'its grammar'} allows needs {needed}.",
                "max_tokens",
            )
        self.is_complete = False  # nothing may follow
        self.allowed: IntArray = np.zeros(grammar.vocabulary.num_words, np.int32)  # bit t % 32 of word t // 32
        self._grammar = grammar
        self._tokens: Any = grammar.tokens.deep_copy()
        self._symbols = grammar.begin()
        self._completion: Completion = grammar.shortest
        self._others = OtherFields(source, grammar.vocabulary)
        self._eos_token_ids = self._others.eos_token_ids
        self._allow_next(num_left)

    def replay(self, token_ids: Sequence[int], num_left: int) -> None:
        """Take tokens that were accepted before, the first with `num_left` still to come."""
        for position, token_id in enumerate(token_ids):
            if not self.accept(token_id, num_left - 1 - position):
                raise EngineError(f"Token {position} of the answer so far leaves no room to bring it to its end.")

    def accept(self, token_id: int, num_left: int) -> bool:
        """Go on with a sampled token, after which `num_left` may come. False: it is not taken, sample another.

        Raises `EngineError` where the grammar cannot go on: the request ends with it.
        """
        if token_id in self._eos_token_ids and self._tokens.is_accepting():
            self.is_complete = True
            return True
        symbols = self._grammar.vocabulary.symbols_of(token_id)
        before = self._symbols.mark()
        if not self._symbols.take(symbols):
            raise EngineError(f"The model said token {token_id}, which the grammar does not allow here.")
        completion = self._find(symbols, num_left)
        if completion is None:
            self._symbols.back_to(before)
            self._steer()
            return False
        if not self._tokens.consume_token(token_id):
            raise EngineError(f"The grammar failed at token {token_id}: {self._tokens.get_error()[:200]}")
        self._completion = completion
        self._others.said.append(token_id)
        self._allow_next(num_left)
        return True

    def _find(self, symbols: list[int], num_left: int) -> Completion | None:
        """A completion of at most `num_left` tokens from here, behind these symbols, if there is one."""
        state = self._symbols
        if num_left == 0 and not state.is_accepting():
            return None
        completer, known = self._grammar.completer, self._completion
        rest = known.after(symbols)
        if rest is None and len(known) and state.completes(known.rest()):
            rest = known  # inside of a text, say, it closes as before
        if rest is not None and rest.fits(num_left):
            return rest
        walked = completer.walk(state, _MAX_WALK_STEPS)
        found = rest if walked is None else walked
        if found is None or found.fits(num_left):
            return found
        shorter = completer.improve(state, found, _MAX_IMPROVE_STEPS, enough=num_left)
        return shorter if shorter.fits(num_left) else None

    def _allow_next(self, num_left: int) -> None:
        if self._tokens.is_stopped() or num_left == 0:
            self.is_complete = self._tokens.is_stopped()
        elif len(self._completion) >= num_left and not self._completion.fits(num_left - 1):
            self._steer()
        else:
            self._tokens.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
            if self._tokens.is_error():
                raise EngineError(f"The grammar failed: {self._tokens.get_error()[:200]}")
            self._heed_other_fields()

    def _steer(self) -> None:
        """For one token, only the known completion."""
        self.allowed[:] = 0
        self._allow([self._completion.first_token()] if len(self._completion) else self._eos_token_ids)
        self._heed_other_fields()

    def _heed_other_fields(self) -> None:
        """Forbid what the request's other fields do: to end. A grammar at its end is an exception: the answer ends,
        although they would have it go on.
        """
        self._others.forbid(self.allowed)
        if not self.allowed.any():
            if not self._tokens.is_accepting():
                raise EngineError("The grammar failed: it allows no token here, and no end.")
            self.is_complete = True

    def _allow(self, token_ids: Sequence[int]) -> None:
        set_bits(self.allowed, token_ids)
