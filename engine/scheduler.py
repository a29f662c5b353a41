"""Who computes which tokens in the next step.

There is no prefill phase and no decode phase. A running request has `num_tokens` known tokens, perhaps some that steps
in flight will sample (`num_pending`), and `num_computed` tokens whose keys and values are in the cache. Each step gives
every request some tokens so that the last number catches up with the first two, within one budget for the batch.
Chunked prefill, prefix hits, decode, recompute after preemption and resume after a crash are all this one rule.

`schedule()` first serves the running requests in order (priority, then arrival), then admits waiting ones in the order
of `RequestQueue`. Where the cache is full, the running request that would be served last gives way: it loses its row
and its blocks, and waits at the front of its class. What it had cached often still is when it comes back.

Cost of a step (schedule + update; every request decoding, context about 500, block size 16, prefix caching on; CPU time
of one thread by `quire bench scheduler`, 2 cores of an AMD EPYC): 111 us for 64 running requests, 334 us for 256, 1,168
us for 1024; the same with 100,000 waiting. In steady decode only array operations run over all rows; Python walks over
the rows that reach a block boundary, over the new tokens, and in small steps over drafts (`speculation`).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from .config import SchedulerConfig
from .deadlines import Deadlines
from .errors import EngineError, InvalidRequestError, QuireError
from .gates import Gate
from .grammar.steps import Verdicts, gather_masks, hold_to_grammars
from .kv_cache_manager import KVCacheManager
from .outputs import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    IntArray,
    ModelRunnerOutput,
    NewRow,
    RequestReport,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from .quarantine import Quarantine
from .request import Request, RequestStatus, check_source
from .request_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from .running_table import RunningTable
from .scheduler_stats import Counts, stats_of
from .shortage import Shortage
from .speculation import Speculation, draft_tokens
from .step_plan import ScheduledStep, StepPlan
from .step_share import StepShare, WholeShare
from .wait_ledger import WaitCause
from .waiting_room import WaitingRoom

_MAX_PREEMPTERS = 8  # names kept of the requests that preempted one


class Scheduler:
    """Owner of all request state. No thread, no device, no clock: `now` is seconds on any steady clock."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_model_len: int,
        gates: tuple[Gate, ...] = (),
        share: StepShare | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.running = RunningTable(config.max_num_seqs)
        self.waiting = WaitingRoom(config, gates)
        self.requests: dict[str, Request] = {}  # unfinished
        self._share = share or WholeShare()
        self._speculation = speculation or Speculation(0)
        self._shortage: Shortage | None = None  # of the next request, where it is that
        self._quarantine = Quarantine()
        self._ended: list[EngineOutput] = []  # ends that no step brought
        self._deadlines = Deadlines(self.requests)
        self._released_rows: list[int] = []
        self._num_arrivals = 0
        self._counts = Counts()

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add(self, source: EngineRequest, now: float) -> None:
        """Queue a request. Raises `InvalidRequestError` or `OverloadedError`, and then nothing is queued."""
        if source.request_id in self.requests:
            raise InvalidRequestError(f"request_id: {source.request_id!r} is in use.", "request_id")
        check_source(source, self.max_model_len)
        if not source.resume_token_ids:  # an open stream that comes from elsewhere is not turned away
            self.waiting.check_room(len(source.prompt_token_ids), source.tenant, source.tenant_weight)
        priority = source.priority if self.config.policy == "priority" else 0
        request = Request(source, self._num_arrivals, priority, self.max_model_len, now)
        self._num_arrivals += 1
        ended = request.finish_reason()
        if ended is not None:  # a resumed request of which only the end was lost
            self._ended.append(EngineOutput(request.request_id, len(source.resume_token_ids), [], *ended))
            return
        self.requests[request.request_id] = request
        self.waiting.tenants.arrive(request.tenant, source.tenant_weight, now)
        self.waiting.push(request, now)
        self._deadlines.add(request)
        self._counts.num_prompt_tokens += request.num_prompt_tokens
        self._counts.num_resumed_requests += bool(source.resume_token_ids)

    def abort(self, request_id: str, now: float) -> EngineOutput | None:
        """End a request in whatever state it is. None if it is not here (any more)."""
        request = self.requests.get(request_id)
        return None if request is None else self._end(request, now, "abort")

    def take_ended(self) -> list[EngineOutput]:
        """Ends of requests since the last call that no step brought: deadlines, gates, requests that had ended."""
        ended = self._ended
        if ended:
            self._ended = []
        return ended

    def explain(self, request_id: str, now: float) -> RequestReport | None:
        """How an unfinished request spent its time so far."""
        request = self.requests.get(request_id)
        return None if request is None else request.report(now)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests) or bool(self._ended)

    # ---- planning a step ------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledStep | None:
        """Plan the next step, or None if no request can compute anything now."""
        self.kv_cache.history.now = now
        self._expire(now)
        suspect = self._quarantine.next()
        plan = None if suspect is None else self._serve_alone(suspect, now)
        if plan is None:
            plan = self._serve_running(now, self.running.rows())
            self._admit_waiting(plan)
            self._speculation.add_to(plan, self.running, self.kv_cache.block_size)
        return self._give_out(plan)

    def awaits(self, last: ScheduledStep) -> bool:
        """Whether the next step had better be planned when `last`, the last one that was given out, is back."""
        has_newcomer = self.running.has_free_row and self.waiting.queue.peek() is not None
        return self._speculation.awaits(last, self.running, self.kv_cache.block_size, has_newcomer=has_newcomer)

    def _serve_alone(self, suspect: Request, now: float) -> StepPlan | None:
        """A plan for one request. None if it cannot get a row: then the others go on, for they hold what it lacks."""
        if suspect.status is not RequestStatus.RUNNING:
            if not self.running.has_free_row:
                return None
            plan = self._serve_running(now, np.empty(0, dtype=np.int32))
            self._admit(suspect, plan)
            return plan if plan.new_rows else None
        return self._serve_running(now, np.array([suspect.row], dtype=np.int32))

    def _serve_running(self, now: float, rows: IntArray) -> StepPlan:
        """Give the running requests in `rows` what they lack, in order, until the budget is spent."""
        table, config = self.running, self.config
        computed = table.num_computed[rows]
        # The last token that a request may have is never computed: nothing is sampled after it.
        end = np.minimum(self._share.known(table, rows), table.max_total[rows] - 1)
        wants = end - computed
        most = config.long_prefill_token_threshold
        limited = np.minimum(wants, most) if most else wants
        limited, budget = self._share.limit(limited, len(table), self.waiting.num_tokens, config.max_num_batched_tokens)
        served_before = limited.cumsum() - limited
        grants = np.minimum(np.maximum(budget - served_before, 0), limited).astype(np.int32)
        plan = StepPlan(now, budget - int(grants.sum()), rows, grants)

        num_blocks = -(-(computed + grants) // self.kv_cache.block_size)
        for index in (num_blocks > table.num_blocks[rows]).nonzero()[0].tolist():
            self._grow(plan, index, int(num_blocks[index]))
        self._bill_running(plan, grants < wants)
        return plan

    def _grow(self, plan: StepPlan, index: int, num_blocks: int) -> None:
        """Get blocks for the request at `index` of the plan, if need be from those that are served after it."""
        row = int(plan.rows[index])
        request = self.running.requests[row]
        if request is None:  # it gave way to one before it
            return
        # What earlier steps filled is final now (an output token is only known here once its step is back), and made
        # findable before a window leaves it behind.
        self.kv_cache.commit(request, self._num_final_tokens(row))
        while (updates := self.kv_cache.grow(row, int(self.running.num_computed[row]), num_blocks)) is None:
            victim = self.running.last()
            assert victim is not None
            plan.revoke(victim.row)
            self._preempt(victim, request, plan.now)
            if victim is request:
                return
        plan.block_updates.extend(updates)
        self.running.num_blocks[row] = num_blocks
        self._charge_output(request)

    def _bill_running(self, plan: StepPlan, is_short: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        """Note in the ledgers whom the budget begins, or ceases, to keep waiting."""
        table, rows = self.running, plan.rows
        for index in (is_short != table.is_short[rows]).nonzero()[0].tolist():
            request = table.requests[rows[index]]
            if request is not None:
                request.ledger.bill(WaitCause.TOKEN_BUDGET if is_short[index] else None, plan.now)
                table.is_short[rows[index]] = is_short[index]

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Give rows to waiting requests, in order, while rows, blocks and budget last."""
        waiting = self.waiting
        waiting.ask_gates_again(plan.now)
        cause = WaitCause.KV_BLOCKS if plan.preempted else None
        while cause is None and (request := waiting.queue.peek()) is not None:
            if not self.running.has_free_row:
                cause = WaitCause.MAX_NUM_SEQS
            elif plan.budget == 0:
                cause = WaitCause.TOKEN_BUDGET
            else:
                cause = self._admit(request, plan)
        waiting.queue.stand_still(cause or WaitCause.TOKEN_BUDGET, plan.now)

    def _admit(self, request: Request, plan: StepPlan) -> WaitCause | None:
        """Admit the whole of the next request, or nothing of it; then say what it and those behind it wait for.

        None: go on with the next one. This request has its row, stands aside for a gate, or has ended.
        """
        waiting, kv_cache, now = self.waiting, self.kv_cache, plan.now
        try:
            if not waiting.pass_gates(request, now):
                return None
        except QuireError as error:
            self._ended.append(self._end(request, now, "error", error))
            return None
        if request.finish_reason() is not None:  # it resumes after its last token, as its gate has found out
            waiting.leave_gates(request)
            self._ended.append(self._end(request, now, "stop"))
            return None
        # What the running ones lack of their prompts, and one block more for each, so that the newcomer is not
        # preempted by their next tokens.
        reserve = len(self.running) + self._num_blocks_to_come()
        if self._shortage is not None and self._shortage.lasts(request, kv_cache.pool, reserve, plan.budget):
            waiting.leave_gates(request)
            return WaitCause.KV_BLOCKS
        hit = kv_cache.find_prefix(request)
        num_computed = hit.num_blocks * kv_cache.block_size
        wants = request.num_tokens - num_computed
        chunk = min(wants, plan.budget, self.config.long_prefill_token_threshold or wants)
        num_missing = kv_cache.num_missing(request.num_tokens, chunk, hit, reserve=reserve)
        if num_missing:
            self._shortage = Shortage(request, num_missing, kv_cache.pool, reserve, plan.budget)
            waiting.leave_gates(request)
            return WaitCause.KV_BLOCKS

        self._shortage = None
        waiting.remove(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
            request.first_miss = kv_cache.first_admission(request, hit)
            request.admitted_at = now
            waiting.tenants[request.tenant].charge(PROMPT_TOKEN_COST * wants)
        num_recomputed = max(request.num_computed_before - num_computed, 0)
        request.num_recomputed_tokens += num_recomputed
        self._counts.num_recomputed_tokens += num_recomputed
        request.status = RequestStatus.RUNNING
        num_blocks = kv_cache.num_blocks_for(num_computed + chunk)
        row = self.running.take_row(request, num_computed, num_blocks)
        kv_cache.admit(row, hit)
        if kv_cache.grow(row, num_computed, num_blocks) is None:
            raise EngineError(f"no room for {num_blocks} blocks, although they were counted: {self.stats()}")
        kv_cache.commit(request, num_computed + chunk)
        self._speculation.enter(request)
        self.running.is_short[row] = chunk < wants
        request.ledger.bill(WaitCause.TOKEN_BUDGET if chunk < wants else None, now)
        plan.budget -= chunk
        plan.new_rows.append(self._new_row(request))
        plan.new_grants.append(chunk)
        return None

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
            first_prompt_logprob=None if request.prompt_logprobs is None else request.prompt_logprobs.next_position,
            pooling=source.pooling,
        )

    def _give_out(self, plan: StepPlan) -> ScheduledStep | None:
        """Fix the plan, and book its tokens as computed, but for drafts: the next step goes on from there."""
        rows, grants = plan.batch()
        if not rows.size:
            self.waiting.drain_rate.pause()
            return None
        table = self.running
        computed = table.num_computed[rows]
        samples = computed + grants == table.num_tokens[rows] + table.num_pending[rows]
        requests = [table.requests[row] for row in rows.tolist()]
        table.num_computed[rows] += grants
        table.num_pending[rows] += samples
        drafts = draft_tokens(plan, rows)
        if drafts is not None:
            grants[drafts.indices] += drafts.counts
        output = SchedulerOutput(
            step_id=self._counts.num_steps,
            rows=rows,
            num_scheduled_tokens=grants,
            num_computed_tokens=computed,
            new_rows=plan.new_rows,
            block_updates=plan.block_updates,
            released_rows=self._released_rows,
            grammar=gather_masks(requests, (samples & table.is_constrained[rows]).nonzero()[0]),
            last_token_ids=self._share.last_token_ids(table, rows, samples),
            drafts=drafts,
        )
        num_tokens = output.total_num_scheduled_tokens
        self._counts.num_steps += 1
        self._released_rows = []
        self._share.given_out(num_tokens)
        self.waiting.drain_rate.record(num_tokens, plan.now)
        return ScheduledStep(output, num_tokens, plan.now, requests, table.epoch[rows], samples)

    # ---- taking in the results of a step --------------------------------------------------------------------------

    def update(self, step: ScheduledStep, result: ModelRunnerOutput, now: float) -> list[EngineOutput]:
        """Book the tokens that a step sampled, and end the requests that they end. In batch order."""
        self._share.taken_in(step.num_tokens)
        self._speculation.learn_step(step, now)
        table, rows = self.running, step.output.rows
        taken = step.samples & (table.epoch[rows] == step.epochs)  # a row released meanwhile belongs to somebody else
        table.num_pending[rows[taken]] -= 1
        tokens = result.sampled_token_ids[:, 0].tolist()
        held = hold_to_grammars(step.requests, (taken & table.is_constrained[rows]).nonzero()[0], tokens)
        if held.objections:
            taken[held.objections] = False
        table.num_tokens[rows[taken]] += 1
        table.last_token_ids[rows[taken]] = result.sampled_token_ids[taken, 0]
        several = step.several_tokens(result, taken)
        logprobs = step.split_logprobs(result.logprobs)
        step.book_prompt_logprobs(result, table.epoch)
        outputs = []
        requests = step.requests
        for index in taken.nonzero()[0].tolist():
            request = requests[index]
            assert request is not None
            request.num_failures = 0
            if request.is_prompt_only:
                self._finish(request, now)
                outputs.append(request.end_of_prompt(step.embedding_of(index, result), request.report(now)))
                continue
            output_token_ids, token_logprobs = request.output_token_ids, logprobs.get(index)
            first_index = len(output_token_ids)
            if index in several:
                self._speculation.book(request, several[index], table)
                token_logprobs = token_logprobs and token_logprobs[: len(output_token_ids) - first_index]
            else:
                output_token_ids.append(tokens[index])
            if (
                output_token_ids[-1] in request.stop_token_ids
                or request.num_tokens >= request.max_total_tokens
                or index in held.ends
            ):
                outputs.append(self._last_output(request, first_index, token_logprobs, now))
            else:
                outputs.append(request.output(first_index, token_logprobs))
            if request.drafter is not None:
                request.drafter.learn(output_token_ids[first_index:])
            self._counts.num_generation_tokens += len(output_token_ids) - first_index
            if request.prompt_logprobs is not None:
                outputs[-1] = request.with_prompt_logprobs(outputs[-1])
        return outputs + self._without_token(step, held, now) if held.objections else outputs

    def _last_output(
        self, request: Request, first_index: int, logprobs: list[TokenLogprobs] | None, now: float
    ) -> EngineOutput:
        """The output of a token that ends the request, unless `min_tokens` says that it does not."""
        ended = request.finish_reason()
        if ended is None:
            return request.output(first_index, logprobs)
        self._finish(request, now)
        return request.output(first_index, logprobs, ended, request.report(now))

    def _without_token(self, step: ScheduledStep, held: Verdicts, now: float) -> list[EngineOutput]:
        """Requests whose grammar did not take the token that was sampled: they end here, or sample again.

        The ranks have appended that token to their copy of the row, so the row is given up. Nearly all that it
        computed is found again by its prefix.
        """
        ends = []
        for index in held.objections:
            request, error = cast(Request, step.requests[index]), held.errors.get(index)
            if error is not None:
                ends.append(self._end(request, now, "error", error))
            elif request.finish_reason() is not None:  # no other token is allowed
                ends.append(self._end(request, now, "stop"))
            else:
                self._leave_row(request)
                request.status = RequestStatus.PREEMPTED
                self.waiting.push(request, now)
        return ends

    # ---- rows and blocks return -----------------------------------------------------------------------------------

    def rewind(self, failed: ScheduledStep, error: str, now: float) -> list[EngineOutput]:
        """Take every running request back to the queue, with nothing computed: the workers' state is lost.

        Returns the ends of requests that are given up, as the cause of the step that failed. Until the next
        `schedule`, whoever waits is billed to the recovery.
        """
        given_up = self._quarantine.blame(each for each in failed.requests if each is not None and self._is_here(each))
        self._counts.num_resumed_requests += len(self.running)
        while (request := self.running.last()) is not None:
            self._leave_row(request)
            request.status = RequestStatus.PREEMPTED
            self.waiting.push(request, now)
        self.kv_cache.reset_prefix_cache()
        self._released_rows = []
        self._share.reset()
        self._speculation.pause()
        self.waiting.queue.all_stand_still(WaitCause.RECOVERY, now)
        ends = []
        for request in given_up:
            message = f"The engine failed {request.num_failures} times in a row with this request: {error}"
            ends.append(self._end(request, now, "error", EngineError(message)))
        return ends

    def _preempt(self, victim: Request, by: Request, now: float) -> None:
        self._leave_row(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.preempted_by = [*victim.preempted_by, by.request_id][-_MAX_PREEMPTERS:]
        self._counts.num_preemptions += 1
        self.waiting.push(victim, now)

    def _expire(self, now: float) -> None:
        """End what is past its deadline."""
        for request in self._deadlines.passed(now):
            error = QuireError(f"deadline_ms: {request.source.deadline_ms} ms have passed.")
            self._ended.append(self._end(request, now, "deadline", error))
            self._counts.num_deadlines_missed += 1

    def _is_here(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

    def _end(self, request: Request, now: float, reason: FinishReason, error: QuireError | None = None) -> EngineOutput:
        """End a request without a further token."""
        self._finish(request, now)
        first_index = len(request.output_token_ids)
        return EngineOutput.last(request.request_id, first_index, reason, error, request.report(now))

    def _finish(self, request: Request, now: float) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.ledger.bill(None, now)
        self.waiting.tenants.leave(request.tenant)
        del self.requests[request.request_id]
        if not self.requests:
            self._speculation.pause()

    def _leave_row(self, request: Request) -> None:
        """Release row and blocks. Steps in flight may still write there: they run before any step that reuses them."""
        row = request.row
        request.num_computed_before = int(self.running.num_computed[row])
        self._charge_output(request)
        self.kv_cache.commit(request, self._num_final_tokens(row))
        self.kv_cache.free(row)
        self.waiting.leave_gates(request)
        self.running.release_row(request)
        self._released_rows.append(row)

    def _charge_output(self, request: Request) -> None:
        """Charge its tenant with what it has said since the last time."""
        num_new = len(request.output_token_ids) - request.num_charged_tokens
        self.waiting.tenants[request.tenant].charge(OUTPUT_TOKEN_COST * num_new)
        request.num_charged_tokens += num_new

    def _num_blocks_to_come(self) -> int:
        """Blocks that the running requests will still ask for to compute the tokens that they know."""
        table, rows = self.running, self.running.rows()
        missing = -(-table.num_tokens[rows] // self.kv_cache.block_size) - table.num_blocks[rows]
        return int(missing.clip(min=0).sum()) * self.kv_cache.num_full_groups

    def _num_final_tokens(self, row: int) -> int:
        """Tokens of the row that are known and computed by the steps given out so far."""
        table = self.running
        return min(int(table.num_computed[row]), int(table.num_tokens[row]))

    # ---- checks and numbers ---------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return stats_of(self._counts, self.kv_cache, self.running, self.waiting, self._speculation)
