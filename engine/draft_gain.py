"""Which drafts (`speculation`) are worth their time, by what was seen so far.

A step brings a token for each request, and one more for each draft that is right. Drafts are chosen so that it brings
the most tokens per second:

    (requests + chances of the drafts) / seconds of a step with as many tokens as both are

or has none, unless that is some more than without. What steps take depends on the CPU, on how weights are stored and on
the length of contexts, and is no line: they are measured, those with drafts by themselves, as they and those that
follow them are not planned ahead. How often guesses are right depends on the text, and is counted by how many of a
request's last ones were.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

MAX_TRUST = 16  # of a request: guesses in a row that were right
_SOME_GUESSES = 64  # of the same trust, that are counted in full: texts differ
_SOME_STEPS = 16  # of a size, that its average remembers
_MEMORY = 256  # steps that were timed, after which a size is tried again
_LONGEST = 1.25  # of the average, that one step counts: whatever else the machine has to do is no cost of its tokens
_LEAST_GAIN = 1.05  # in tokens per second, for which a step has drafts: averages are no better known


class Wanted(NamedTuple):
    """What a request could have."""

    trust: int  # in its next guess
    most: int  # drafts
    num_pending: int = 0  # tokens under way, the guesses for which come before the drafts


class DraftPolicy(Protocol):
    """Which of the drafts that there are a step computes. Owned by the scheduler's `Speculation`."""

    most_requests: int  # of a step in which drafts are looked for

    def choose(self, wanted: Mapping[int, Wanted], num_requests: int, num_tokens: int, room: int) -> Mapping[int, int]:
        """How many drafts each row gets, `room` in all, in a step of some requests with `num_tokens` without drafts."""
        ...

    def learn(self, trust: int, *, was_right: bool) -> None:
        """A guess of a request whose last `trust` ones were right."""
        ...

    def learn_step(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """What a step of decodes and drafts took, with what it makes others wait."""
        ...


class EveryDraft:
    """All that there is room for, the first rows first."""

    most_requests = sys.maxsize

    def choose(
        self,
        wanted: Mapping[int, Wanted],
        num_requests: int,  # noqa: ARG002 (nothing is weighed)
        num_tokens: int,  # noqa: ARG002 (likewise)
        room: int,
    ) -> Mapping[int, int]:
        counts = {}
        for row, each in wanted.items():
            if room > 0:
                counts[row] = min(each.most, room)
                room -= each.most
        return counts

    def learn(self, trust: int, *, was_right: bool) -> None:
        pass

    def learn_step(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        pass


class StepCosts:
    """Seconds of a step, by its tokens."""

    def __init__(self) -> None:
        self._num_steps = 0  # of which some had other sizes, or are not counted here
        self._seen: dict[int, tuple[float, int, int]] = {}  # mean seconds, of how many steps, and the last one's number

    def learn(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return  # by a clock that has not moved
        self.pass_by()
        mean, count, last = self._seen.get(num_tokens, (seconds, 0, 0))
        if self._num_steps - last > _MEMORY:
            mean, count = seconds, 0
        if count == 1:  # the first of a size may have had to record it, or to wait for others
            mean = seconds = min(mean, seconds)
        seconds = min(seconds, _LONGEST * mean)
        count = min(count + 1, _SOME_STEPS)
        self._seen[num_tokens] = mean + (seconds - mean) / count, count, self._num_steps

    def pass_by(self) -> None:
        """A step of which nothing is learnt."""
        self._num_steps += 1

    def seconds(self, num_tokens: int, unknown: float = 1.0) -> float:
        """A size that was not seen of late is taken for as fast as it could be, so that it is tried: as if its tokens
        beyond those of a smaller one were free, or it took its part of a larger one. `unknown`: where none was seen."""
        known = {size: mean for size, (mean, count, last) in self._seen.items() if count > 1 and self._is_fresh(last)}
        smaller = [size for size in known if size <= num_tokens]
        if smaller:
            return known[max(smaller)]
        return known[min(known)] * num_tokens / min(known) if known else unknown

    def _is_fresh(self, last: int) -> bool:
        return self._num_steps - last < _MEMORY


class DraftGain:
    """Those that bring more tokens per second.

    Of more than a few requests, to look for what they repeat, and to plan a step when the one before is back, takes
    what drafts bring, or more.
    """

    most_requests = 3

    def __init__(self) -> None:
        self.costs, self.draft_costs = StepCosts(), StepCosts()
        self._right, self._checked = [1.0] * (MAX_TRUST + 1), [2.0] * (MAX_TRUST + 1)  # by trust

    def learn_step(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        own, other = (self.draft_costs, self.costs) if has_drafts else (self.costs, self.draft_costs)
        own.learn(num_tokens, seconds)
        other.pass_by()

    def learn(self, trust: int, *, was_right: bool) -> None:
        if self._checked[trust] >= _SOME_GUESSES:
            self._right[trust] /= 2
            self._checked[trust] /= 2
        self._right[trust] += was_right
        self._checked[trust] += 1

    def choose(self, wanted: Mapping[int, Wanted], num_requests: int, num_tokens: int, room: int) -> Mapping[int, int]:
        chances = sorted((chance for row in wanted.items() for chance in self._chances(*row)), reverse=True)[:room]
        # Where no step without drafts was seen of late, one is as fast as it could be, so that it is tried.
        least = self.costs.seconds(num_tokens, self.draft_costs.seconds(num_tokens))
        right, best, most = 0.0, 0, _LEAST_GAIN * num_requests / least
        for count, (chance, _) in enumerate(chances, start=1):
            right += chance
            rate = (num_requests + right) / max(self.draft_costs.seconds(num_tokens + count, least), least)
            if rate > most:
                best, most = count, rate
        return Counter(row for _, row in chances[:best])

    def _chances(self, row: int, wanted: Wanted) -> list[tuple[float, int]]:
        """That a row's first draft is right, its first two, and so on: one behind a wrong guess is lost."""
        chance, found = 1.0, []
        for level in range(wanted.trust, wanted.trust + wanted.num_pending + wanted.most):
            at = min(level, MAX_TRUST)
            chance *= self._right[at] / self._checked[at]
            found.append((chance, row))
        return found[wanted.num_pending :]
