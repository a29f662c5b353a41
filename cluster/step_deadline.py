"""When a step that has not come back counts as hung: late against the steps that were measured, not against a guess."""

from __future__ import annotations

FACTOR = 20.0  # times the slowest step of its size: a busy machine is slow, a stopped rank never comes back
MIN_S = 5.0  # below that, a pause of the machine would look like a hang
MIN_STEPS = 8  # of a size, before it is judged by them: the first ones compile and warm up
SURE_MIN_S = 2.0  # once a size is known well, its slowest step tells what pauses this machine makes
SURE_STEPS = 256
_DECAY = 0.99  # per step: one slow step long ago says less and less


class StepDeadline:
    """Steps are sorted by size, tokens in powers of two; each size remembers its slowest step, slowly forgetting.

    A size that is not known yet is judged by the next smaller one that is, as if time grew with tokens; where none is,
    by `most_s`, which no deadline exceeds.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._slowest_s: dict[int, float] = {}  # by size
        self._num_steps: dict[int, int] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, self._slowest_s.get(size, 0.0) * _DECAY)
        self._num_steps[size] = self._num_steps.get(size, 0) + 1

    def allowed_s(self, num_tokens: int) -> float:
        """Seconds that a step may take."""
        size = num_tokens.bit_length()
        for known in range(size, -1, -1):
            num_steps = self._num_steps.get(known, 0)
            if num_steps >= MIN_STEPS:
                expected_s = self._slowest_s[known] * (1 << size - known)
                least_s = SURE_MIN_S if known == size and num_steps >= SURE_STEPS else MIN_S
                return min(self._most_s, max(least_s, FACTOR * expected_s))
        return self._most_s
