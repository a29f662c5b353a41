"""Who computes which tokens in the next step.

There is no prefill phase and no decode phase. A running request has `num_tokens` known tokens, perhaps some that
steps in flight will sample (`num_pending`), and `num_computed` tokens whose keys and values are in the cache. Each
step gives every request some tokens so that the last number catches up with the first two, within one budget for the
batch. Chunked prefill, prefix hits, decode, recompute after preemption and resume after a crash are all this one
rule.

`schedule()` first serves the running requests in order (priority, then arrival), then admits waiting ones. Where the
cache is full, the running request that would be served last gives way: it loses its row and its blocks, and returns
to its old place in the queue. What it had cached often still is when it comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from .config import SchedulerConfig
from .errors import InvalidRequestError, OverloadedError
from .kv_cache_manager import KVCacheManager
from .outputs import (
    BatchLogprobs,
    BlockUpdate,
    EngineOutput,
    EngineRequest,
    FinishReason,
    IntArray,
    ModelRunnerOutput,
    NewRow,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from .request import Request, RequestStatus
from .request_queue import RequestQueue
from .running_table import RunningTable


@dataclass(slots=True)
class StepPlan:
    """A step while it is being planned. `budget` is what is left of `max_num_batched_tokens`."""

    budget: int
    rows: IntArray
    grants: IntArray
    new_rows: list[NewRow] = field(default_factory=list)
    new_grants: list[int] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step as it was given to the workers, with what is needed to recognise whose its results are."""

    output: SchedulerOutput
    requests: list[Request | None]  # in batch order
    epochs: IntArray  # [num_reqs] of the rows, when the step was planned
    samples: npt.NDArray[np.bool_]  # [num_reqs] whether the row samples a token


class Scheduler:
    """Owner of all request state (DESIGN 4.2). Pure: no clock, no thread, no device."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, max_model_len: int) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.running = RunningTable(config.max_num_seqs)
        self.waiting = RequestQueue()
        self.requests: dict[str, Request] = {}  # unfinished
        self._released_rows: list[int] = []
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add(self, source: EngineRequest) -> EngineOutput | None:
        """Queue a request. Returns its last output at once if its resume tokens already end it.

        Raises `InvalidRequestError` or `OverloadedError`, and then nothing is queued.
        """
        self._check(source)
        priority = source.priority if self.config.policy == "priority" else 0
        request = Request(source, self._num_arrivals, priority, self.max_model_len)
        ended = request.finish_reason()
        if ended is not None:
            return EngineOutput(
                request.request_id, len(source.resume_token_ids), [], cast(FinishReason, ended[0]), ended[1]
            )
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.push(request)
        self._num_prompt_tokens += request.num_prompt_tokens
        return None

    def abort(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> EngineOutput | None:
        """End a request in whatever state it is. None if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request)
        return EngineOutput(request_id, len(request.output_token_ids), [], reason, error=error)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # ---- planning a step ------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None if no request can compute anything now."""
        plan = self._serve_running()
        if not plan.preempted:
            self._admit_waiting(plan)
        if not plan.rows.size and not plan.new_rows:
            return None
        return self._give_out(plan)

    def _serve_running(self) -> StepPlan:
        """Give running requests what they lack, in order, until the budget is spent."""
        table, config = self.running, self.config
        rows = table.rows()
        computed = table.num_computed[rows]
        # The last token that a request may have is never computed: nothing is sampled after it.
        end = np.minimum(table.num_tokens[rows] + table.num_pending[rows], table.max_total[rows] - 1)
        wants = end - computed
        if config.long_prefill_token_threshold:
            wants = np.minimum(wants, config.long_prefill_token_threshold)
        served_before = np.cumsum(wants) - wants
        grants = np.clip(config.max_num_batched_tokens - served_before, 0, wants).astype(np.int32)
        plan = StepPlan(config.max_num_batched_tokens - int(grants.sum()), rows, grants)

        num_blocks = -(-(computed + grants) // self.kv_cache.block_size)
        for index in np.flatnonzero(num_blocks > table.num_blocks[rows]).tolist():
            self._grow(plan, index, int(num_blocks[index]))
        granted = plan.grants > 0
        if not granted.all():
            plan.rows, plan.grants = rows[granted], plan.grants[granted]
        return plan

    def _grow(self, plan: StepPlan, index: int, num_blocks: int) -> None:
        """Get blocks for the request at `index` of the plan, if need be from those that are served after it."""
        row = int(plan.rows[index])
        request = self.running.requests[row]
        if request is None:  # it gave way to one before it
            return
        while (updates := self.kv_cache.grow(row, int(self.running.num_computed[row]), num_blocks)) is None:
            victim = self.running.last()
            assert victim is not None
            plan.grants[np.flatnonzero(plan.rows == victim.row)] = 0
            plan.preempted = True
            self._preempt(victim)
            if victim is request:
                return
        plan.block_updates.extend(updates)
        self.running.num_blocks[row] = num_blocks
        # What earlier steps filled is final now; an output token is only known here once its step is back.
        self.kv_cache.commit(request, self._num_final_tokens(row))

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Give rows to waiting requests, in order, while rows, budget and blocks last."""
        while plan.budget > 0 and self.running.has_free_row:
            request = self.waiting.peek()
            if request is None or not self._admit(request, plan):
                return

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        kv_cache, config = self.kv_cache, self.config
        hit = kv_cache.find_prefix(request)
        num_computed = hit.num_blocks * kv_cache.block_size
        chunk = min(request.num_tokens - num_computed, plan.budget)
        if config.long_prefill_token_threshold:
            chunk = min(chunk, config.long_prefill_token_threshold)
        # One block for each running request, so that the newcomer is not preempted by their next tokens.
        if not kv_cache.can_admit(request.num_tokens, chunk, hit, reserve=len(self.running)):
            return False
        self.waiting.remove(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
            kv_cache.count_query(request, hit)
        num_blocks = kv_cache.num_blocks_for(num_computed + chunk)
        row = self.running.take_row(request, num_computed, num_blocks)
        request.status = RequestStatus.RUNNING
        kv_cache.admit(row, hit)
        kv_cache.grow(row, num_computed, num_blocks)
        kv_cache.commit(request, num_computed + chunk)
        plan.budget -= chunk
        plan.new_rows.append(self._new_row(request))
        plan.new_grants.append(chunk)
        return True

    def _new_row(self, request: Request) -> NewRow:
        source = request.source
        return NewRow(
            row=request.row,
            request_id=request.request_id,
            token_ids=request.all_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=source.sampling_params,
            seed=source.seed,
            choice_index=source.choice_index,
            eos_token_ids=source.eos_token_ids,
            block_ids=self.kv_cache.tables(request.row),
        )

    def _give_out(self, plan: StepPlan) -> ScheduledStep:
        """Fix the plan, and book its tokens as computed: the next step goes on from there."""
        table = self.running
        rows = np.concatenate((plan.rows, np.array([new.row for new in plan.new_rows], dtype=np.int32)))
        grants = np.concatenate((plan.grants, np.array(plan.new_grants, dtype=np.int32)))
        computed = table.num_computed[rows]
        samples = computed + grants == table.num_tokens[rows] + table.num_pending[rows]
        table.num_computed[rows] += grants
        table.num_pending[rows] += samples
        output = SchedulerOutput(
            step_id=self._num_steps,
            rows=rows,
            num_scheduled_tokens=grants,
            num_computed_tokens=computed,
            new_rows=plan.new_rows,
            block_updates=plan.block_updates,
            released_rows=self._released_rows,
        )
        self._num_steps += 1
        self._released_rows = []
        requests = table.requests
        return ScheduledStep(output, [requests[row] for row in rows.tolist()], table.epoch[rows], samples)

    # ---- taking in the results of a step --------------------------------------------------------------------------

    def update(self, step: ScheduledStep, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Book the tokens that a step sampled, and end the requests that they end."""
        table, rows = self.running, step.output.rows
        taken = step.samples & (table.epoch[rows] == step.epochs)  # a row released meanwhile belongs to somebody else
        table.num_pending[rows[taken]] -= 1
        table.num_tokens[rows[taken]] += 1
        tokens = result.sampled_token_ids[:, 0].tolist()
        logprobs = _split_logprobs(result.logprobs) if result.logprobs is not None else {}
        outputs = []
        requests = step.requests
        for index in np.flatnonzero(taken).tolist():
            request = requests[index]
            assert request is not None
            outputs.append(self._append(request, tokens[index], logprobs.get(index)))
        self._num_generation_tokens += len(outputs)
        return outputs

    def _append(self, request: Request, token_id: int, logprobs: list[TokenLogprobs] | None) -> EngineOutput:
        output_token_ids = request.output_token_ids
        first_index = len(output_token_ids)
        output_token_ids.append(token_id)
        request.num_failures = 0
        num_cached = request.num_cached_tokens or 0
        ended = None
        if token_id in request.stop_token_ids or request.num_tokens >= request.max_total_tokens:
            ended = request.finish_reason()
        if ended is None:
            return EngineOutput(request.request_id, first_index, [token_id], None, None, logprobs, num_cached)
        self._finish(request)
        reason = cast(FinishReason, ended[0])
        return EngineOutput(request.request_id, first_index, [token_id], reason, ended[1], logprobs, num_cached)

    # ---- rows and blocks return -----------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Take every running request back to the queue, with nothing computed: the workers' state is lost."""
        while (request := self.running.last()) is not None:
            self._leave_row(request)
            request.status = RequestStatus.PREEMPTED
            self.waiting.push(request)
        self.kv_cache.reset_prefix_cache()
        self._released_rows = []

    def _preempt(self, request: Request) -> None:
        self._leave_row(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.push(request)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _leave_row(self, request: Request) -> None:
        """Release row and blocks. Steps in flight may still write there: they run before any step that reuses them."""
        row = request.row
        self.kv_cache.commit(request, self._num_final_tokens(row))
        self.kv_cache.free(row)
        self.running.release_row(request)
        self._released_rows.append(row)

    def _num_final_tokens(self, row: int) -> int:
        """Tokens of the row that are known and computed by the steps given out so far."""
        table = self.running
        return min(int(table.num_computed[row]), int(table.num_tokens[row]))

    # ---- checks and numbers ---------------------------------------------------------------------------------------

    def _check(self, source: EngineRequest) -> None:
        if source.request_id in self.requests:
            raise InvalidRequestError(f"request_id: {source.request_id!r} is in use.", "request_id")
        num_prompt_tokens = len(source.prompt_token_ids)
        if not num_prompt_tokens:
            raise InvalidRequestError("prompt: must hold at least one token.", "prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt: {num_prompt_tokens} tokens leave no room for an answer; the context is "
                f"{self.max_model_len} tokens, so at most {self.max_model_len - 1} are allowed.",
                "prompt",
                "context_length_exceeded",
            )
        limit = self.config.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            raise OverloadedError(
                f"{len(self.waiting)} requests are waiting, which is the most allowed. Try again later."
            )

    def stats(self) -> SchedulerStats:
        pool = self.kv_cache.pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self.kv_cache.num_queried_tokens,
            prefix_cache_hits=self.kv_cache.num_hit_tokens,
        )


def _split_logprobs(batch: BatchLogprobs) -> dict[int, list[TokenLogprobs]]:
    """Logprobs by position in the batch."""
    result = {}
    columns = (batch.indices.tolist(), batch.token_ids.tolist(), batch.logprobs.tolist(), batch.sampled_ranks.tolist())
    for index, token_ids, values, rank in zip(*columns, strict=True):
        top = [(token_id, value) for token_id, value in zip(token_ids[1:], values[1:], strict=True) if token_id >= 0]
        result[index] = [TokenLogprobs(token_ids[0], values[0], rank, top)]
    return result
