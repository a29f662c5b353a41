"""Which drafts (`speculation`) are worth their time, by what was seen so far.

A step brings a token for each request, and one more for each draft that is right. Drafts are chosen so that it brings
the most tokens per second:

    (requests + chances of the drafts) / seconds of a step with as many tokens as both are

What steps take depends on the CPU, on how weights are stored and on the length of contexts, and is no line: they are
measured. How often guesses are right depends on the text, and is counted by how many of a request's last ones were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

MAX_TRUST = 16  # of a request: guesses in a row that were right
_SOME_GUESSES = 64  # of the same trust, that are counted in full: texts differ
_SOME_STEPS = 16  # of a size, that its average remembers
_MEMORY = 256  # steps after which a size is tried again


class DraftPolicy(Protocol):
    """Which of the drafts that there are a step computes. Owned by the scheduler's `Speculation`."""

    def choose(
        self, wanted: Mapping[int, tuple[int, int]], num_requests: int, num_tokens: int, room: int
    ) -> Mapping[int, int]:
        """How many drafts each row gets, `room` in all, in a step of some requests with `num_tokens` without drafts.

        wanted: by row, the trust in its guesses and the most it can take.
        """
        ...

    def learn(self, trust: int, *, was_right: bool) -> None:
        """A guess of a request whose last `trust` ones were right."""
        ...

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """What a step of decodes and drafts took."""
        ...


class EveryDraft:
    """All that there is room for, the first rows first."""

    def choose(
        self,
        wanted: Mapping[int, tuple[int, int]],
        num_requests: int,  # noqa: ARG002 (nothing is weighed)
        num_tokens: int,  # noqa: ARG002 (likewise)
        room: int,
    ) -> Mapping[int, int]:
        counts = {}
        for row, (_, count) in wanted.items():
            if room > 0:
                counts[row] = min(count, room)
                room -= count
        return counts

    def learn(self, trust: int, *, was_right: bool) -> None:
        pass

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        pass


class StepCosts:
    """Seconds of a step, by its tokens."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seen: dict[int, tuple[float, int, int]] = {}  # mean seconds, of how many steps, and the last one's number

    def learn(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return  # by a clock that has not moved
        self._num_steps += 1
        mean, count, last = self._seen.get(num_tokens, (seconds, 0, 0))
        if self._num_steps - last > _MEMORY:
            mean, count = seconds, 0
        if count == 1:  # the first of a size may have had to record it, or to wait for others
            mean = seconds = min(mean, seconds)
        count = min(count + 1, _SOME_STEPS)
        self._seen[num_tokens] = mean + (seconds - mean) / count, count, self._num_steps

    def seconds(self, num_tokens: int) -> float:
        """A size that was not seen of late is taken for as fast as it could be, so that it is tried: as if its tokens
        beyond those of a smaller one were free, or it took its part of a larger one."""
        known = {size: mean for size, (mean, count, last) in self._seen.items() if count > 1 and self._is_fresh(last)}
        smaller = [size for size in known if size <= num_tokens]
        if smaller:
            return known[max(smaller)]
        return known[min(known)] * num_tokens / min(known) if known else 1.0

    def _is_fresh(self, last: int) -> bool:
        return self._num_steps - last < _MEMORY


class DraftGain:
    """Those that bring more tokens per second."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._right, self._checked = [1.0] * (MAX_TRUST + 1), [2.0] * (MAX_TRUST + 1)  # by trust

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        self.costs.learn(num_tokens, seconds)

    def learn(self, trust: int, *, was_right: bool) -> None:
        if self._checked[trust] >= _SOME_GUESSES:
            self._right[trust] /= 2
            self._checked[trust] /= 2
        self._right[trust] += was_right
        self._checked[trust] += 1

    def choose(
        self, wanted: Mapping[int, tuple[int, int]], num_requests: int, num_tokens: int, room: int
    ) -> Mapping[int, int]:
        chances = sorted((chance for row in wanted.items() for chance in self._chances(*row)), reverse=True)[:room]
        right, best, most = 0.0, 0, num_requests / self.costs.seconds(num_tokens)
        for count, (chance, _) in enumerate(chances, start=1):
            right += chance
            rate = (num_requests + right) / self.costs.seconds(num_tokens + count)
            if rate > most:
                best, most = count, rate
        return Counter(row for _, row in chances[:best])

    def _chances(self, row: int, wanted: tuple[int, int]) -> list[tuple[float, int]]:
        """That a row's first guess is right, its first two, and so on: a draft behind a wrong one is lost."""
        trust, most = wanted
        chance, found = 1.0, []
        for level in range(trust, trust + most):
            at = min(level, MAX_TRUST)
            chance *= self._right[at] / self._checked[at]
            found.append((chance, row))
        return found
