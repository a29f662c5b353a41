"""Where an answer stands in its grammar, in symbols, and what would be after some more of them.

To look ahead, a matcher goes on and comes back:

    mark = state.mark()     { " a "
    state.take(...)         { " a " : 1 }        accepting: this completes it
    state.back_to(mark)     { " a "

That costs the same however long the answer is. (A copy of a matcher has everything that it has ever read.) Lexemes with
`max_tokens` or `stop` cannot come back: their grammars are copied at each mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """A place to come back to, once."""

    num_taken: int
    copy: Any  # of the matcher as it was there; None where it can come back by itself


def comes_back(matcher: Any) -> bool:
    """Whether a matcher at its beginning, which is left as it is, can go on and come back."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if not allowed:
        return True
    tried = matcher.deep_copy()
    tried.consume_token((allowed & -allowed).bit_length() - 1)
    tried.rollback(1)
    return not tried.is_error()


class SymbolState:
    """Owned by a `Constraint`, or by the compiler. `beginning`: llguidance's matcher over symbols, which is copied."""

    def __init__(self, beginning: Any, *, comes_back: bool) -> None:
        self._beginning = beginning
        self._comes_back = comes_back
        self._matcher = beginning.deep_copy()
        self._taken: list[int] = []

    def take(self, symbols: Sequence[int]) -> bool:
        """Go on. False where the grammar does not allow them: then nothing works but `back_to`."""
        if not self._matcher.consume_tokens(symbols):
            return False
        self._taken += symbols
        return True

    def mark(self) -> Mark:
        return Mark(len(self._taken), None if self._comes_back else self._matcher.deep_copy())

    def back_to(self, mark: Mark) -> None:
        num_back = len(self._taken) - mark.num_taken
        del self._taken[mark.num_taken :]
        if mark.copy is not None:
            self._matcher = mark.copy
        elif self._matcher.is_error():  # what it was asked for was not allowed, or more than its limits let it do
            self._matcher = self._beginning.deep_copy()
            self._matcher.consume_tokens(self._taken)
        elif num_back:
            self._matcher.rollback(num_back)

    def completes(self, symbols: Sequence[int]) -> bool:
        """Whether the grammar accepts what there is with these behind it."""
        if not self.allows(symbols):
            return False
        mark = self.mark()
        accepts = self.take(symbols) and self.is_accepting()
        self.back_to(mark)
        return accepts

    def allows(self, symbols: Sequence[int]) -> bool:
        """Whether all of them may follow, one behind the other."""
        return bool(self._matcher.validate_tokens(symbols) == len(symbols))

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def allowed(self) -> int:
        """The symbols that may follow, as bits."""
        return int.from_bytes(self._matcher.compute_bitmask(), "little")

    def forced(self) -> list[int]:
        """Bytes that can only be these; up to the first special token, if there is one."""
        text: bytes = self._matcher.compute_ff_bytes()
        return list(text.partition(b"\xff")[0])

    def error(self) -> str:
        return str(self._matcher.get_error())
