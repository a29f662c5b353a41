"""A model made of hashes, on a KV cache that is really kept in blocks.

The "hidden state" of position p is a hash of the state of p - 1 and of the token at p, and it is what the cache holds
for p. A step reads the states before it from the cache through the block tables it was given, never from anywhere else,
so that a wrong table, a block reused too early or a false prefix hit gives other tokens. Every position that attention
would read is checked as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from quire.engine.errors import ExecutorError
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.outputs import (
    BatchLogprobs,
    FloatArray,
    IntArray,
    ModelRunnerOutput,
    NewRow,
    PromptLogprobs,
    SchedulerOutput,
)
from quire.engine.pooling import PoolingParams
from quire.engine.speculation import DEFAULT_NUM_TOKENS

VOCABULARY = 50
EMPTY = (-1, -1)


def next_state(state: int, token_id: int) -> int:
    """Its last six bits are the token."""
    return hash((state, token_id)) & 0xFFFFFFC0 | token_id  # ints hash alike in every process


def pick(state: int, row: NewRow) -> int:
    """Any token; with some seeds, mostly one that follows from the last, so that an answer repeats itself."""
    choice = hash((state, row.seed, row.choice_index))
    if row.seed % 5 > 2 and choice % 8:
        return (state & 63) ^ 1
    return choice % VOCABULARY


def expected_tokens(prompt: list[int], count: int, seed: int = 0, choice_index: int = 0) -> list[int]:
    """What the model says without any engine around it."""
    row = NewRow(
        row=0,
        request_id="",
        token_ids=[],
        num_prompt_tokens=0,
        sampling_params=None,  # type: ignore[arg-type]
        seed=seed,
        choice_index=choice_index,
        eos_token_ids=(),
        block_ids=(),
    )
    state = 0
    for token_id in prompt:
        state = next_state(state, token_id)
    tokens = []
    for _ in range(count):
        tokens.append(pick(state, row))
        state = next_state(state, tokens[-1])
    return tokens


def prompt_logprobs_of(tokens: Sequence[int], positions: range, states: Sequence[int]) -> PromptLogprobs:
    """Of the tokens at `positions`, each from the state before it."""
    token_ids = np.array([[tokens[position]] for position in positions], np.int32).reshape(-1, 1)
    logprobs = np.array([[-float(state % 4096)] for state in states], np.float32).reshape(-1, 1)
    return PromptLogprobs(positions.start, token_ids, logprobs, np.array([state % 97 for state in states], np.int32))


def pooled(params: PoolingParams, states: Mapping[int, int], num_prompt_tokens: int) -> FloatArray:
    positions = {"last": [num_prompt_tokens - 1], "cls": [0], "mean": range(num_prompt_tokens)}[params.type]
    return np.array([sum(states[position] % 4096 for position in positions)], np.float32)


def states_of(prompt: Sequence[int]) -> list[int]:
    state, states = 0, []
    for token_id in prompt:
        state = next_state(state, token_id)
        states.append(state)
    return states


class FakeExecutor:
    """Implements `Executor`.

    `fail_steps`: numbers of execute() calls that fail, after which it must be restarted. `poison`: request ids that
    break every step that computes them, from the one on in which they have `poison_from` tokens. With `num_stages` it
    is a pipeline: the layers of each stage have all `windows`, and what is sampled is known only once a step tells it.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...] = (None,),
        block_size: int = 4,
        num_blocks: int = 64,
        fail_steps: tuple[int, ...] = (),
        poison: frozenset[str] = frozenset(),
        poison_from: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.num_stages = num_stages
        self._specs = [KVCacheSpec(block_size, 1, 1, 1, window) for window in windows * num_stages]
        self._num_blocks = num_blocks
        self._fail_steps = set(fail_steps)
        self._poison = poison
        self._poison_from = poison_from
        self._broken = False
        self.num_calls = 0
        self.num_restarts = 0
        self.steps: list[SchedulerOutput] = []

    def preferred_inflight_steps(self) -> int:
        return self.num_stages

    def preferred_speculative_tokens(self) -> int:
        return DEFAULT_NUM_TOKENS

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._specs

    def available_kv_cache_bytes(self) -> list[int]:
        return [self._num_blocks * self._specs[0].block_bytes] * self.num_stages

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._block_size = config.block_size
        self._windows = [group.spec.sliding_window for group in config.groups]
        # A block holds one group's states at a time, whichever group's table it stands in.
        self._cache = [EMPTY] * (config.num_blocks * config.block_size)
        self._rows: dict[int, NewRow] = {}
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, tuple[list[int], ...]] = {}
        self._states: dict[int, dict[int, int]] = {}  # of rows that are embedded

    def takes_next_step(self) -> bool:
        return True

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        if not self._broken and (self.num_calls in self._fail_steps or self._is_poisoned(step)):
            self._broken = True
        self.num_calls += 1
        if self._broken:
            future.set_exception(ExecutorError("a rank is gone"))
        else:
            self.steps.append(step)
            future.set_result(self._run(step))
        return future

    def _is_poisoned(self, step: SchedulerOutput) -> bool:
        ids = {row: new.request_id for row, new in self._rows.items()} | {r.row: r.request_id for r in step.new_rows}
        ends = (step.num_computed_tokens + step.num_scheduled_tokens).tolist()
        return any(
            ids[row] in self._poison and end >= self._poison_from
            for row, end in zip(step.rows.tolist(), ends, strict=True)
        )

    def restart(self) -> None:
        self._broken = False
        self.num_restarts += 1

    def shutdown(self) -> None:
        pass

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for row in step.released_rows:
            del self._rows[row], self._tokens[row], self._tables[row]
            self._states.pop(row, None)
        for new in step.new_rows:
            assert new.row not in self._rows, f"row {new.row} is taken"
            self._rows[new.row] = new
            self._tokens[new.row] = list(new.token_ids)
            self._tables[new.row] = tuple(list(table) for table in new.block_ids)
        for update in step.block_updates:
            table = self._tables[update.row][update.group]
            assert len(table) == update.offset
            table.extend(update.block_ids)
        self._tell(step)
        drafts = self._drafts(step)
        sampled = np.full((len(step.rows), 1 + max(map(len, drafts.values()), default=0)), -1, dtype=np.int32)
        batch = list(
            zip(step.rows.tolist(), step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist(), strict=True)
        )
        # Position by position over the whole batch: as in a model's layers, whoever attends to a position finds it
        # written, also when another request of the same step writes it.
        for index, token_ids in drafts.items():
            self._tokens[batch[index][0]] += token_ids
        for position, row in sorted((start + i, row) for row, start, count in batch for i in range(count)):
            self._compute(row, position)
        for row, start, _ in batch:
            self._check_window(row, start)
        for index, (row, start, count) in enumerate(batch):
            tokens = self._tokens[row]
            assert start + count <= len(tokens), "scheduled beyond the last token"
            if start + count == len(tokens) and self._rows[row].pooling is None:
                new = self._sample(row, start + count - 1 - len(drafts.get(index, ())), drafts.get(index, []))
                sampled[index, : len(new)] = new
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=sampled,
            logprobs=self._logprobs(step.rows.tolist(), sampled),
            prompt_logprobs=[each for i, span in enumerate(batch) for each in self._prompt_logprobs(i, *span)],
            embeddings=[each for i, span in enumerate(batch) for each in self._embedding(i, *span)],
        )

    def _drafts(self, step: SchedulerOutput) -> dict[int, list[int]]:
        """By index in the batch."""
        if step.drafts is None:
            return {}
        assert self.num_stages == 1
        indices = step.drafts.indices.tolist()
        assert indices == sorted(set(indices))
        drafts = [[token_id for token_id in token_ids if token_id >= 0] for token_ids in step.drafts.token_ids.tolist()]
        assert all(drafts)
        assert step.drafts.counts.tolist() == list(map(len, drafts))
        for index, each in zip(indices, drafts, strict=True):
            assert len(self._tokens[step.rows[index]]) + len(each) == (
                step.num_computed_tokens[index] + step.num_scheduled_tokens[index]
            ), "drafts follow the last known token"
        return dict(zip(indices, drafts, strict=True))

    def _sample(self, row: int, position: int, drafts: list[int]) -> list[int]:
        """The tokens after `position` and after the drafts that are right; the row has them then, and no draft."""
        tokens, new = self._tokens[row], []
        for draft in [*drafts, None]:
            new.append(pick(self._read(row, 0, position + len(new)), self._rows[row]))
            if new[-1] != draft:
                break
        del tokens[position + 1 :]
        if self.num_stages == 1:
            tokens += new
        return new

    def _tell(self, step: SchedulerOutput) -> None:
        """Take in what the step says of sampled tokens: one at most per row is news."""
        assert (step.last_token_ids is not None) == (self.num_stages > 1)
        ends = (step.num_computed_tokens + step.num_scheduled_tokens).tolist()
        told = [] if step.last_token_ids is None else step.last_token_ids.tolist()
        for row, end, token_id in zip(step.rows.tolist(), ends, told, strict=False):
            if token_id >= 0:
                assert len(self._tokens[row]) in (end - 1, end), f"row {row}: a token was not told"
                self._tokens[row][end - 1 :] = [token_id]

    def _prompt_logprobs(self, index: int, row: int, start: int, count: int) -> list[tuple[int, PromptLogprobs]]:
        """The logprob of each token is the state before it. Told of those that are asked for and computed here."""
        new = self._rows[row]
        if new.first_prompt_logprob is None:
            return []
        positions = range(max(new.first_prompt_logprob, start + 1), min(start + count, new.num_prompt_tokens - 1) + 1)
        if not positions:
            return []
        states = [self._read(row, 0, position - 1) for position in positions]
        return [(index, prompt_logprobs_of(self._tokens[row], positions, states))]

    def _embedding(self, index: int, row: int, start: int, count: int) -> list[tuple[int, FloatArray]]:
        """The states of the prompt's positions, pooled: of those that this row's own steps computed."""
        new = self._rows[row]
        if new.pooling is None:
            return []
        states = self._states.setdefault(row, {})
        states |= {position: self._read(row, 0, position) for position in range(start, start + count)}
        if start + count < new.num_prompt_tokens:
            return []
        return [(index, pooled(new.pooling, states, new.num_prompt_tokens))]

    def _logprobs(self, rows: list[int], sampled: IntArray) -> BatchLogprobs | None:
        """For the rows that asked, as many as any of them asked for: tokens 0, 1, 2, ... with logprobs -1, -2, ..."""
        asked = {i: self._rows[row].sampling_params.logprobs for i, row in enumerate(rows) if sampled[i, 0] >= 0}
        wanted = {i: count for i, count in asked.items() if count is not None}
        if not wanted:
            return None
        chosen = [(i, token_id) for i in wanted for token_id in sampled[i].tolist() if token_id >= 0]
        indices, most = np.array([i for i, _ in chosen], np.int32), max(wanted.values())
        top = np.tile(np.arange(most, dtype=np.int32), (len(indices), 1))
        return BatchLogprobs(
            indices=indices,
            token_ids=np.hstack([np.array([[token_id] for _, token_id in chosen], np.int32), top]),
            logprobs=np.hstack([np.full((len(indices), 1), -0.5, np.float32), -1.0 - top.astype(np.float32)]),
            sampled_ranks=np.ones(len(indices), np.int32),
        )

    def _check_window(self, row: int, start: int) -> None:
        """Everything before `start` that a token at `start` attends to is there."""
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(start - window + 1, 0)
            for position in range(first, start):
                self._read(row, group, position)

    def _compute(self, row: int, position: int) -> None:
        for group in range(len(self._windows)):
            before = self._read(row, group, position - 1) if position else 0
            slot = self._slot(row, group, position)
            self._cache[slot] = (position, next_state(before, self._tokens[row][position]))

    def _read(self, row: int, group: int, position: int) -> int:
        stored, state = self._cache[self._slot(row, group, position)]
        assert stored == position, f"row {row}, group {group}: position {position} holds that of {stored}"
        return state

    def _slot(self, row: int, group: int, position: int) -> int:
        block_id = self._tables[row][group][position // self._block_size]
        assert block_id != 0, f"row {row}, group {group}: position {position} is in the null block"
        return block_id * self._block_size + position % self._block_size


class TimedExecutor(FakeExecutor):
    """Each step takes a second of its `clock`, by the time that its result is asked for."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return _Timed(self, super().execute(step))


class _Timed(Future[ModelRunnerOutput]):
    def __init__(self, executor: TimedExecutor, done: Future[ModelRunnerOutput]) -> None:
        super().__init__()
        self._executor, self._done = executor, done

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._executor.now += 1.0
        return self._done.result(timeout)
