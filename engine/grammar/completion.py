"""How an answer can be brought to its end from where it is, in few tokens.

A `Completion` is a concrete path: symbols (bytes and special tokens) after which the grammar accepts. A matcher has
walked it, so it works; how short it is depends on the search.

The search has two parts. A *walk* follows the grammar from a state to its nearest end by a fixed preference among the
symbols allowed: what closes, then what is short, and in the same place again what it took least often, which gets it
out of loops. `improve` then tries, at every place of a walk where there was a choice, each other choice followed by a
walk, and keeps what needs fewer tokens. What it found better is remembered by the look of the place, so that later
walks choose well at once. Effort is counted in steps and not in seconds: the same state gives the same path in every
process.
"""

from __future__ import annotations

from collections.abc import Sequence

from .symbol_state import SymbolState
from .vocabulary import NUM_BYTES, Vocabulary

MAX_SYMBOLS = 1 << 16  # of one walk
_CONTENT = 64  # more symbols allowed than this: inside of a text
_RESCAN = 16  # in a text that goes on, every so many bytes all others are tried for a way out
_MAX_TRIED = 16  # other choices tried at one place
_MAX_LITERALS = 32
_CLASS = 8  # so many digits allowed: any digit
_PATIENCE = 64  # times at one place before what is unlikely to help is taken
_ANY = -1  # instead of a symbol, in counts
_NUM_BIASES = 6

_QUOTE = ord('"')
_WHITESPACE = b" \t\n\r"
_HEX = b"0123456789abcdefABCDEF"
_CLOSERS = b'}]"'
_OPENERS = b"\\{["
_LAST = _OPENERS + _WHITESPACE
_PREFERRED = b'}]"0123456789,:nft'


def _ranks() -> list[int]:
    """By byte: how late a walk takes it where few are allowed."""
    others = [byte for byte in range(NUM_BYTES) if byte not in _PREFERRED and byte not in _LAST]
    ranks = [0] * NUM_BYTES
    for rank, byte in enumerate([*_PREFERRED, *others, *_LAST]):
        ranks[byte] = rank
    return ranks


_RANKS = _ranks()


class Completion:
    """A path from a state to an accepting one. Immutable but for what it has computed of itself."""

    __slots__ = ("_costs", "_start", "_vocabulary", "symbols")

    def __init__(
        self, vocabulary: Vocabulary, symbols: list[int], start: int = 0, costs: list[int] | None = None
    ) -> None:
        self.symbols = symbols
        self._start = start
        self._vocabulary = vocabulary
        self._costs = costs

    def __len__(self) -> int:
        """Symbols that are left."""
        return len(self.symbols) - self._start

    def rest(self) -> list[int]:
        return self.symbols[self._start :] if self._start else self.symbols

    @property
    def num_tokens(self) -> int:
        """The fewest tokens that spell it."""
        return self._all_costs()[self._start]

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens are enough to spell it."""
        if len(self) <= num_tokens and self._costs is None and self._vocabulary.spells_each(self.rest()):
            return True  # a token for each symbol would do: no need to count
        return self.num_tokens <= num_tokens

    def first_token(self) -> int:
        return self._vocabulary.first_token(self.symbols, self._start, self._all_costs())

    def after(self, symbols: Sequence[int]) -> Completion | None:
        """What is left of it when the answer goes on with `symbols`; None if it does not go that way."""
        end = self._start + len(symbols)
        if self.symbols[self._start : end] != symbols:
            return None
        return Completion(self._vocabulary, self.symbols, end, self._costs)

    def _all_costs(self) -> list[int]:
        if self._costs is None:
            self._costs = self._vocabulary.costs(self.symbols)
        return self._costs


class _Walk:
    """What one walk remembers, so that no loop holds it.

    `bias` is a byte that it takes wherever it may choose, `shunned` are those that it takes when nothing else helps.
    """

    def __init__(self, bias: int, shunned: bytes) -> None:
        self.bias = bias
        self._shunned = shunned
        self.ways: dict[int, list[int]] = {}  # by the symbols allowed inside a text: those that lead elsewhere
        self._counts: dict[tuple[int, int], int] = {}

    def count(self, mask: int, symbol: int) -> int:
        """How often this was counted before."""
        before = self._counts.get((mask, symbol), 0)
        self._counts[mask, symbol] = before + 1
        return before

    def weight(self, mask: int, symbol: int) -> int:
        """How little a symbol is worth taking again where these are allowed."""
        count = self._counts.get((mask, symbol), 0)
        if symbol == self.bias or (symbol < NUM_BYTES and symbol in _CLOSERS):
            return count // _PATIENCE
        return count + (_PATIENCE if symbol < NUM_BYTES and symbol in self._shunned else 0)


class Completer:
    """Finds completions in one grammar, which is of JSON or not. `literals` are texts that may have to be said."""

    def __init__(self, vocabulary: Vocabulary, literals: Sequence[bytes] = (), *, json: bool = False) -> None:
        self._shunned = _OPENERS + _WHITESPACE if json else _OPENERS  # JSON needs no white space
        self._vocabulary = vocabulary
        self._literals = [list(text) for text in literals[:_MAX_LITERALS]]
        self._learned: dict[int, int] = {}  # by the symbols allowed: the choice that was found to be best
        self._steps_left = 0
        self.problem = ""  # what the matcher said when a walk came to nothing

    def walk(self, state: SymbolState, max_steps: int) -> Completion | None:
        """A completion from `state`, which is left as it is. None when none was found."""
        self._steps_left = max_steps
        symbols = self._walk(state)
        return None if symbols is None else Completion(self._vocabulary, symbols)

    def improve(
        self, state: SymbolState, found: Completion, max_steps: int, *, enough: int = 0, learn: bool = False
    ) -> Completion:
        """A completion that is shorter than `found`, or that one; no better one than of `enough` tokens is looked for.

        `state` is left as it is. `learn`: later walks choose as this one did.
        """
        self._steps_left = max_steps
        found = self._try_biases(state, found)
        start, best, position = state.mark(), found, 0
        while position < len(best) and self._steps_left > 0 and not best.fits(enough):
            symbols = best.rest()
            forced = state.forced()
            if not forced:
                mask = self._allowed(state)
                for symbol in self._alternatives(mask, symbols[position]):
                    tried = self._try(state, symbols[:position], symbol)
                    if tried is not None and _is_shorter(tried, best):
                        best = tried
                        if learn:
                            self._learned[mask] = symbol
                forced = best.rest()[position : position + 1]
            if not state.take(forced):
                break
            position += len(forced)
        state.back_to(start)
        return best

    def _try_biases(self, state: SymbolState, best: Completion) -> Completion:
        """Walks that repeat one byte wherever they may: some are spelled with few tokens."""
        for bias in self._vocabulary.runs[:_NUM_BIASES]:
            symbols = self._walk(state, bias)
            tried = None if symbols is None else Completion(self._vocabulary, symbols)
            if tried is not None and _is_shorter(tried, best):
                best = tried
        return best

    def _try(self, state: SymbolState, before: list[int], symbol: int) -> Completion | None:
        start = state.mark()
        after = self._walk(state) if state.take([symbol]) else None
        state.back_to(start)
        return None if after is None else Completion(self._vocabulary, [*before, symbol, *after])

    def _walk(self, state: SymbolState, bias: int = -1) -> list[int] | None:
        """The symbols from `state`, which is left as it is, to an accepting one; None when the steps run out."""
        path: list[int] = []
        walk, start, is_lost = _Walk(bias, self._shunned), state.mark(), False
        while not (is_lost or state.is_accepting()):
            symbols = state.forced() or self._choose(state, walk)
            self._steps_left -= 1
            if not symbols or self._steps_left < 0 or len(path) > MAX_SYMBOLS or not state.take(symbols):
                self.problem = state.error()
                is_lost = True
            path += symbols
        state.back_to(start)
        return None if is_lost else path

    def _choose(self, state: SymbolState, walk: _Walk) -> list[int]:
        mask = self._allowed(state)
        if mask.bit_count() > _CONTENT:
            return self._go_through_text(state, mask, walk)
        learned = self._learned.get(mask, -1)
        members = _members(mask)
        if not members:
            return []
        symbol = min(
            members, key=lambda each: (walk.weight(mask, each), each != learned, each != walk.bias, _rank(each))
        )
        walk.count(mask, symbol)
        return [symbol]

    def _go_through_text(self, state: SymbolState, mask: int, walk: _Walk) -> list[int]:
        """Inside a text: what leads out of it, if anything does; else what fills it with few tokens."""
        if mask >> _QUOTE & 1 and self._leads_on(state, mask, [_QUOTE]):
            return [_QUOTE]
        been_here = walk.count(mask, _ANY)
        if mask in walk.ways or been_here % _RESCAN == 0:
            for literal in self._literals:
                if self._leads_on(state, mask, literal):
                    return literal
            members = walk.ways.get(mask) or _members(mask)
            if been_here < _PATIENCE:  # an escape, or a character of several bytes, only leads back here
                members = [symbol for symbol in members if symbol < 128 and symbol not in _LAST]
            ways = [symbol for symbol in members if self._leads_on(state, mask, [symbol])]
            if ways:
                walk.ways[mask] = ways
                way = min(ways, key=lambda symbol: (walk.weight(mask, symbol), _rank(symbol)))
                walk.count(mask, way)
                return [way]
        return [self._filler(mask)]

    def _leads_on(self, state: SymbolState, mask: int, symbols: list[int]) -> bool:
        """Whether something else is allowed after `symbols` than before them."""
        self._steps_left -= 1
        if not state.allows(symbols):
            return False
        start = state.mark()
        leads_on = state.take(symbols) and (state.is_accepting() or self._allowed(state) != mask)
        state.back_to(start)
        return leads_on

    def _filler(self, mask: int) -> int:
        runs = self._vocabulary.run_length
        return max((each for each in _members(mask) if each < NUM_BYTES), key=lambda byte: (runs[byte], -byte))

    def _alternatives(self, mask: int, taken: int) -> list[int]:
        """Other choices than the one taken, those first that a walk would prefer."""
        if mask.bit_count() > _CONTENT:
            return [symbol for symbol in (_QUOTE, self._filler(mask)) if symbol != taken and mask >> symbol & 1]
        others = sorted((each for each in _members(mask) if each != taken), key=_rank)
        if len(others) >= _CLASS and all(each in _HEX for each in others):
            return []  # one digit is as good as another
        shunned_space = set(self._shunned) & set(_WHITESPACE)
        return [each for each in others if each not in shunned_space][:_MAX_TRIED]

    def _allowed(self, state: SymbolState) -> int:
        """The symbols allowed, as bits; where there are others, without bytes that only occur inside of tokens."""
        mask = state.allowed()
        return mask & self._vocabulary.usable_symbols or mask


def _members(mask: int) -> list[int]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _rank(symbol: int) -> int:
    return _RANKS[symbol] if symbol < NUM_BYTES else symbol


def _is_shorter(one: Completion, other: Completion) -> bool:
    return (one.num_tokens, len(one)) < (other.num_tokens, len(other))
