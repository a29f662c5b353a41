"""Speculative decoding: tokens are guessed, and a step checks several guesses in the time of one token.

    known        ... t5 t6 t7            a step computes t7 and, behind it, the drafts
    drafts                    a  b  c    what follows where "t5 t6 t7" stood before
    sampled                   a  b  x y  one token behind t7, a, b and c each
    new tokens                a  b  x    those behind right guesses; x is what c should have been

A step that decodes reads all weights for one token of each request, and takes hardly longer with some more. Drafts are
looked up in the request's own tokens (prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding):
what quotes its prompt, or repeats itself, comes several tokens at a time. As sampling is a function of logits,
parameters, seed and position, a token that was guessed is the one that would have come, drawn or greedy.
"""

from __future__ import annotations

from array import array

import numpy as np

from .config import EngineConfig
from .draft_gain import MAX_TRUST, DraftPolicy, EveryDraft, Wanted
from .errors import ConfigError
from .outputs import DraftTokens, IntArray
from .request import Request
from .running_table import RunningTable
from .step_plan import ScheduledStep, StepPlan

DEFAULT_NUM_TOKENS = 4  # drafts of a request in one step, where nobody says otherwise
_LARGEST_MATCH, _SMALLEST_MATCH = 3, 2  # tokens that have to stand before
_WINDOW = 8192  # tokens that are searched, from the end
_MAX_TRIES = 16  # what a search finds may begin amid a token
_BYTES = 4  # of a token

# Tokens in a step up to which one more is cheap: CPUs read weights for so many about as fast as for one, and multiply
# packed ones in 1.4 (matrix tiles) or 2.3 times the time of one. Beyond, most products take as long as they have rows,
# and a draft what a token is worth (tests/benchmarks/RESULTS.md: what steps of 1 to 32 take).
_NUM_CHEAP = 8
MAX_STEP_DRAFTS = _NUM_CHEAP - 1  # of all requests; workers have room for so many


def num_speculative_tokens(config: EngineConfig, preferred: int) -> int:
    """Drafts of a request in one step. `preferred`: `Executor.preferred_speculative_tokens`.

    Raises `ConfigError` if the user asks for drafts that cannot be.
    """
    wanted = config.scheduler.num_speculative_tokens
    if config.parallel.pipeline_parallel_size > 1:
        if wanted:
            raise ConfigError("scheduler.num_speculative_tokens: must be 0 (or not given) in a pipeline.")
        return 0
    return preferred if wanted is None else wanted


class NgramDrafter:
    """Guesses how a request goes on: as it did after its last tokens when they stood there before.

    `trust` is how many of its guesses in a row were right, those that no step checked as well; where it has none, or
    nobody asks, it falls. `policy` is told of each. Owned by the request's scheduler.
    """

    __slots__ = ("_drafts", "_policy", "_tokens", "trust")

    def __init__(self, token_ids: list[int], policy: DraftPolicy) -> None:
        self._policy = policy
        self._tokens = bytearray(array("i", token_ids[-_WINDOW:]).tobytes())
        self._drafts: list[int] | None = None  # nobody has asked
        self.trust = 0

    def draft(self, count: int) -> list[int]:
        """Guesses for the `count` tokens behind those that it knows, or none. The same until it learns."""
        if self._drafts is None:
            self._drafts, start = [], self._find()
            if start >= 0:
                self._drafts = array("i", bytes(self._tokens[start : start + count * _BYTES])).tolist()
            while 0 < len(self._drafts) < count:  # it goes on with what it has just guessed
                self._drafts += self._drafts[: count - len(self._drafts)]
        return self._drafts

    def learn(self, token_ids: list[int]) -> None:
        """The tokens that really came, since the last call."""
        if not self._drafts:
            self.trust = max(self.trust - 1, 0)
        for draft, token_id in zip(self._drafts or (), token_ids, strict=False):
            self._policy.learn(self.trust, was_right=draft == token_id)
            if draft != token_id:
                self.trust = 0
                break
            self.trust = min(self.trust + 1, MAX_TRUST)
        self._drafts = None
        self._tokens += array("i", token_ids).tobytes()
        if len(self._tokens) > 2 * _WINDOW * _BYTES:
            del self._tokens[: -_WINDOW * _BYTES]

    def _find(self) -> int:
        """Where, in bytes, the tokens begin that followed the last ones the last time that they stood there; or -1."""
        end = len(self._tokens)
        for num_tokens in range(_LARGEST_MATCH, _SMALLEST_MATCH - 1, -1):
            size = num_tokens * _BYTES
            if size >= end:
                continue
            pattern = self._tokens[end - size :]
            stop = end - _BYTES
            for _ in range(_MAX_TRIES):
                found = self._tokens.rfind(pattern, 0, stop)
                if found < 0:
                    break
                if found % _BYTES == 0:
                    return found + size
                stop = found + size - 1
        return -1


class Speculation:
    """Which requests of a step compute drafts, and how many: up to `num_tokens` each, 0 for none ever, those that the
    policy chooses. Owned by the scheduler."""

    def __init__(self, num_tokens: int, policy: DraftPolicy | None = None) -> None:
        """`policy`: every draft if None."""
        self._num_tokens = num_tokens
        self._policy = policy or EveryDraft()
        self._known_at: float | None = None  # when the last step was back, unless nothing was to do since
        self._plans_ahead = False  # whether steps are planned beside others at all: then it was asked about one
        self.num_drafts = 0  # draft tokens given out
        self.num_accepted = 0  # those that were right

    def enter(self, request: Request) -> None:
        """A request has taken a row. It gets no drafts where something follows each of its tokens that would have to
        be taken back: counts for its penalties, the state of its grammar.
        """
        params = request.source.sampling_params
        if not self._num_tokens or request.is_prompt_only or request.constraint is not None or params.has_penalties:
            return
        if request.drafter is None:
            request.drafter = NgramDrafter(request.all_token_ids, self._policy)

    def awaits(self, last: ScheduledStep, table: RunningTable, block_size: int, *, has_newcomer: bool) -> bool:
        """Whether the next step had better be planned when `last`, which was given out, is back.

        How many tokens its drafts bring is known then only: nobody goes on, so that those who have some and those who
        have none stay in one step. And a request whose guesses are worth their time now will have some behind the token
        that is under way, if that is as guessed; but not in a step with parts of prompts, as that of a newcomer.
        """
        self._plans_ahead = True
        if last.output.drafts is not None:
            return True
        rows, room = table.rows(), _NUM_CHEAP - len(table)
        if not self._num_tokens or room <= 0 or len(table) > self._policy.most_requests:
            return False
        if has_newcomer or (table.num_computed[rows] < table.num_tokens[rows]).any():
            return False
        _, wanted = self._guess(rows[table.num_pending[rows] > 0], table, block_size)
        return bool(wanted and self._policy.choose(wanted, len(rows), len(rows), room))

    def add_to(self, plan: StepPlan, table: RunningTable, block_size: int) -> None:
        """Give drafts to the requests that compute just their last token, as long as the step stays small.

        Nobody has to wait, or to give way, for a draft: it takes what is left of the budget when the step is planned
        otherwise, and of the blocks that its request has.
        """
        if not self._num_tokens:
            return
        num_tokens = int(plan.grants.sum()) + sum(plan.new_grants)
        num_requests = int((plan.grants > 0).sum()) + len(plan.new_grants)
        room = min(plan.budget, _NUM_CHEAP - num_tokens)
        if room <= 0 or num_requests > self._policy.most_requests:
            return
        rows = plan.rows
        ready = (plan.grants == 1) & (table.num_computed[rows] + 1 == table.num_tokens[rows])
        drafts, wanted = self._guess(rows[ready], table, block_size)
        if not wanted:
            return
        counts = self._policy.choose(wanted, num_requests, num_tokens, room)
        plan.drafts = {row: drafts[row][:count] for row, count in counts.items()}
        given = sum(counts.values())
        plan.budget -= given
        self.num_drafts += given

    def _guess(
        self, rows: IntArray, table: RunningTable, block_size: int
    ) -> tuple[dict[int, list[int]], dict[int, Wanted]]:
        """By row, what may follow the known tokens, and what of it the request could have."""
        drafts, wanted = {}, {}
        for row in rows.tolist():
            request = table.requests[row]
            if request is None or request.drafter is None:
                continue
            drafts[row] = request.drafter.draft(self._num_tokens)
            num_pending = int(table.num_pending[row])
            num_tokens = request.num_tokens + num_pending
            num_blocks = max(int(table.num_blocks[row]), -(-num_tokens // block_size))  # as it will have for those
            room_in_blocks = num_blocks * block_size - num_tokens
            # One more than were right the last time.
            trust = request.drafter.trust
            count = min(trust + 1, len(drafts[row]), room_in_blocks, request.num_tokens_left - num_pending - 1)
            if count > 0:
                wanted[row] = Wanted(trust, count, num_pending)
        return drafts, wanted

    def learn_step(self, step: ScheduledStep, now: float) -> None:
        """What a step took whose results are there, since those of the one before. Prompts are computed in other ways
        than as many decodes.

        Where steps are planned ahead, one that was not counts with drafts alone, which are the reason, and twice what
        passed before it was planned: that passes before the next one as well.
        """
        begun = step.planned_at if self._known_at is None else self._known_at
        wait, self._known_at = max(step.planned_at - begun, 0.0), now
        drafts, is_alone = step.output.drafts, step.planned_at >= begun
        num_drafts = 0 if drafts is None else int(drafts.counts.sum())
        if step.num_tokens > _NUM_CHEAP or step.num_tokens - num_drafts != len(step.requests):
            return
        if not self._plans_ahead:
            wait = 0.0
        elif is_alone and drafts is None:
            return
        self._policy.learn_step(step.num_tokens, now - begun + wait, has_drafts=drafts is not None)

    def pause(self) -> None:
        """No step follows the last one at once."""
        self._known_at = None

    def book(self, request: Request, sampled: list[int], table: RunningTable) -> None:
        """What a step sampled after a request's last token and the drafts that were right is appended to it, up to the
        token that ends it, and the counters of its row follow.
        """
        row, output_token_ids = request.row, request.output_token_ids
        first = len(output_token_ids)
        for token_id in sampled:
            output_token_ids.append(token_id)
            if request.finish_reason() is not None:
                break
        new = output_token_ids[first:]
        table.num_tokens[row] += len(new) - 1  # the first one is booked like everybody's
        table.num_computed[row] += len(new) - 1
        table.last_token_ids[row] = new[-1]
        self.num_accepted += len(new) - 1


def draft_tokens(plan: StepPlan, rows: IntArray) -> DraftTokens | None:
    """Those of a plan for the workers; `rows` are those of its batch."""
    if not plan.drafts:
        return None
    indices = np.flatnonzero(np.isin(rows, list(plan.drafts))).astype(np.int32)
    drafts = [plan.drafts[row] for row in rows[indices].tolist()]
    most = max(map(len, drafts))
    return DraftTokens(
        indices=indices,
        token_ids=np.array([each + [-1] * (most - len(each)) for each in drafts], np.int32),
    )
