"""What the prefix caches of all engines hold, as one gateway knows it: from a prompt to what each engine has of it.

One dictionary for all engines: a block's number (`prefix_keys.py`) to a bit mask of the engines that hold it. So a
prompt is looked up once and not once per engine, and each step of the search is one AND over all engines at a time.

Memory is bounded by `max_entries` (blocks times engines, some 100 bytes each). When there are more, the index forgets
every other block, by the lowest bit of its number, and again with the next bit when that does not suffice: of a prompt
it then looks only at the blocks that it may know. It estimates a little less than there is, and stays right.

What a gateway has just sent somewhere will be cached there as soon as it is computed: `expect` says so before the
engine does, so that a burst of requests with one new prefix, or the choices of one prompt, go to one engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from .prefix_keys import CONTENT_BITS, CacheLayout, PromptKeys

MAX_ENTRIES = 2_000_000
MAX_EXPECTED = 200_000  # blocks of one generation
EXPECT_S = 10.0  # an expectation lasts that long, at most twice that


class CacheIndex:
    """Owned and changed by one gateway's event loop."""

    def __init__(self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._engines: dict[int, int] = {}  # block number -> mask of the engines that hold it
        self._blocks: dict[str, set[int]] = {}  # engine id -> the block numbers it holds, of those that are kept
        self._layouts: dict[str, CacheLayout] = {}
        self._members: dict[CacheLayout, int] = {}  # mask of the engines with that layout
        self._bits: dict[str, int] = {}  # engine id -> its bit in the masks
        self._skipped = 0  # mask: blocks with one of these bits in their number are not kept
        self.num_entries = 0
        self._expected: list[dict[int, int]] = [{}, {}]  # the current generation and the one before
        self._expected_since = clock()

    # ---- what engines tell ----------------------------------------------------------------------------------------

    def reset(self, engine_id: str, layout: CacheLayout, numbers: Iterable[int]) -> None:
        """An engine holds exactly these blocks."""
        self.forget(engine_id)
        free = next(bit for bit in (1 << i for i in range(len(self._bits) + 1)) if bit not in self._bits.values())
        self._bits[engine_id] = free
        self._layouts[engine_id] = layout
        self._members[layout] = self._members.get(layout, 0) | free
        self._blocks[engine_id] = set()
        self.update(engine_id, numbers, ())

    def update(self, engine_id: str, stored: Iterable[int], removed: Iterable[int]) -> None:
        """An engine that is known holds blocks that it did not hold, and lacks others."""
        bit, blocks, engines, skipped = self._bits[engine_id], self._blocks[engine_id], self._engines, self._skipped
        before = len(blocks)
        for number in removed:
            if number in blocks:
                blocks.discard(number)
                self._take_away(number, bit)
        for number in stored:
            if not number & skipped:
                blocks.add(number)
                engines[number] = engines.get(number, 0) | bit
        self.num_entries += len(blocks) - before
        while self.num_entries > self._max_entries and self._skipped + 1 < 1 << CONTENT_BITS:
            self._forget_every_other()

    def clear(self, engine_id: str) -> None:
        """An engine that is known holds nothing any more."""
        self.reset(engine_id, self._layouts[engine_id], ())

    def forget(self, engine_id: str) -> None:
        """An engine is gone, or what it holds is not known any more. Harmless for one that is not known."""
        bit = self._bits.pop(engine_id, 0)
        if not bit:
            return
        blocks = self._blocks.pop(engine_id)
        layout = self._layouts.pop(engine_id)
        self._members[layout] &= ~bit
        if not self._members[layout]:
            del self._members[layout]
        for number in blocks:
            self._take_away(number, bit)
        self.num_entries -= len(blocks)
        for generation in self._expected:
            for number in [number for number, mask in generation.items() if mask & bit]:
                generation[number] &= ~bit

    # ---- what this gateway does and asks --------------------------------------------------------------------------

    def layouts(self) -> set[CacheLayout]:
        """The layouts of the engines that are known."""
        return set(self._members)

    def expect(self, engine_id: str, prompt: PromptKeys) -> None:
        """A prompt was sent to an engine: what it holds of it soon."""
        layout = self._layouts.get(engine_id)
        if layout is None:
            return
        if self._clock() - self._expected_since > EXPECT_S or len(self._expected[0]) > MAX_EXPECTED:
            self._expected = [{}, self._expected[0]]
            self._expected_since = self._clock()
        bit, current, skipped = self._bits[engine_id], self._expected[0], self._skipped
        for number in chain(*prompt.of(layout)):
            if not number & skipped:
                current[number] = current.get(number, 0) | bit

    def hits(self, prompt: PromptKeys, engine_ids: Iterable[str]) -> dict[str, int]:
        """By engine, the tokens of a prompt that it can take from its cache; engines with none are left out."""
        bits, asked = self._bits, 0
        for engine_id in engine_ids:
            asked |= bits.get(engine_id, 0)
        lengths: dict[int, int] = {}  # an engine's bit -> tokens
        for layout, members in self._members.items():
            if mask := members & asked:
                for engines, num_blocks in self._search(prompt.of(layout), layout, mask):
                    lengths |= dict.fromkeys(_each_bit(engines), num_blocks * layout.block_size)
        if not lengths:
            return {}
        return {engine_id: lengths[bit] for engine_id, bit in bits.items() if bit in lengths}

    # ---- the search -----------------------------------------------------------------------------------------------

    def _search(self, groups: tuple[list[int], ...], layout: CacheLayout, mask: int) -> list[tuple[int, int]]:
        """Masks of engines, and the longest prefix in blocks that they can use: the largest n that every group has.

        A full group has n blocks if all of them are there, a windowed one if those are that the next token attends to.
        """
        usable: list[int] | None = None  # per n - 1, the engines that can use n blocks
        for numbers, window in zip(groups, layout.windows, strict=True):
            if window is None:
                mine = self._prefixes(numbers, mask)
            else:
                mine = _windows(self._holders(numbers, mask), window, layout.block_size)
            # `zip` ends with the shorter: beyond it, some full group has nothing.
            usable = mine if usable is None else [a & b for a, b in zip(usable, mine, strict=False)]
        found, left = [], mask
        for index in range(len(usable or []) - 1, -1, -1):
            assert usable is not None
            engines = usable[index] & left
            if engines and not groups[0][index] & self._skipped:  # of a block that is not kept nothing is known
                found.append((engines, index + 1))
                left &= ~engines
                if not left:
                    break
        return found

    def _prefixes(self, numbers: Sequence[int], mask: int) -> list[int]:
        """Per block, the engines that hold it and all before it; ends where nobody does."""
        held, current, before = self._engines, self._expected[0], self._expected[1]
        skipped = self._skipped
        masks = []
        for number in numbers:
            if not number & skipped:
                mask &= held.get(number, 0) | current.get(number, 0) | before.get(number, 0)
                if not mask:
                    break
            masks.append(mask)
        return masks

    def _holders(self, numbers: Sequence[int], mask: int) -> list[int]:
        """Per block, the engines that hold it, or may: all of them, where the block is not kept."""
        held, current, before = self._engines, self._expected[0], self._expected[1]
        skipped = self._skipped
        return [
            mask if number & skipped else mask & (held.get(number, 0) | current.get(number, 0) | before.get(number, 0))
            for number in numbers
        ]

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _take_away(self, number: int, bit: int) -> None:
        left = self._engines[number] & ~bit
        if left:
            self._engines[number] = left
        else:
            del self._engines[number]

    def _forget_every_other(self) -> None:
        self._skipped = skipped = self._skipped << 1 | 1
        self._engines = {number: mask for number, mask in self._engines.items() if not number & skipped}
        for engine_id, blocks in self._blocks.items():
            self._blocks[engine_id] = {number for number in blocks if not number & skipped}
        self.num_entries = sum(map(len, self._blocks.values()))


def _windows(holders: Sequence[int], window: int, block_size: int) -> list[int]:
    """Per n - 1, the engines that hold the last blocks of the first n: those that a window over the next token reaches.

    ANDs over spans of 1, 2, 4, ... blocks make that a few passes, however long the window is:

        | 0 | 1 | 2 | 3 | 4 |       n = 5, reach 3: span of 2 from 2, and span of 2 that ends with 4
    """
    reach = -(-(window - 1) // block_size)  # blocks, where n ends on a block's border
    if reach <= 0:
        return [-1] * len(holders)
    span, spans = 1, list(holders)  # spans[i]: the AND of `span` blocks that end with block i, or of all before
    while 2 * span <= reach:
        spans = [each & (spans[i - span] if i >= span else -1) for i, each in enumerate(spans)]
        span *= 2
    shift = reach - span
    return [each & (spans[i - shift] if i >= shift else -1) for i, each in enumerate(spans)]


def _each_bit(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
