"""A request inside the engine: the one place that knows its tokens and its state."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from .block_hash import ROOT, BlockHash, hash_block, hash_scope, media_key
from .errors import EngineError, InvalidRequestError
from .grammar.request_fields import check_other_fields
from .outputs import EngineOutput, RequestReport
from .prompt_logprobs import PromptLogprobsBuffer
from .wait_ledger import WaitCause, WaitLedger

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .grammar.constraint import Constraint
    from .grammar.gate import CompiledGrammar
    from .kv_cache_manager import PrefixMiss
    from .outputs import EngineRequest, FinishReason, FloatArray, TokenLogprobs
    from .speculation import NgramDrafter


_MAX_TOKEN_ID = 2**31 - 1  # workers hold them as int32
_MAX_DEADLINE_MS = 365 * 24 * 3600 * 1000


class RequestStatus(enum.Enum):
    """WAITING → RUNNING ⇄ PREEMPTED → FINISHED; from any state to FINISHED by an abort."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """Owned and mutated by the scheduler.

    `num_tokens` counts prompt and known output tokens. How many of them are computed is a matter of the row that the
    request runs in (`RunningTable`): a request that does not run has computed nothing.
    """

    __slots__ = (
        "admitted_at",
        "arrival_index",
        "block_hashes",
        "compiling",
        "constraint",
        "deadline",
        "drafter",
        "first_miss",
        "is_prompt_only",
        "ledger",
        "max_total_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_before",
        "num_failures",
        "num_preemptions",
        "num_recomputed_tokens",
        "opening",
        "output_token_ids",
        "preempted_by",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "row",
        "scope",
        "source",
        "status",
        "stop_token_ids",
        "tenant",
    )

    def __init__(
        self, source: EngineRequest, arrival_index: int, priority: int, max_model_len: int, now: float = 0.0
    ) -> None:
        params = source.sampling_params
        self.source = source
        self.request_id = source.request_id
        self.prompt_token_ids = source.prompt_token_ids
        self.output_token_ids = list(source.resume_token_ids)
        self.arrival_index = arrival_index
        self.priority = priority
        max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len
        # It ends when its prompt is computed: in its books, with one token that is never sampled.
        self.is_prompt_only = source.pooling is not None or max_tokens == 0
        self.max_total_tokens = min(len(self.prompt_token_ids) + max_tokens, max_model_len)
        if self.is_prompt_only:
            self.max_total_tokens = len(self.prompt_token_ids) + 1
        # Those of a request that is resumed arrived with its first token.
        wants_logprobs = params.prompt_logprobs is not None and source.pooling is None and not source.resume_token_ids
        self.prompt_logprobs = PromptLogprobsBuffer() if wants_logprobs else None  # until they are handed out
        eos = () if params.ignore_eos else source.eos_token_ids
        self.stop_token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.row = -1
        self.tenant = source.tenant
        self.deadline = None if source.deadline_ms is None else now + source.deadline_ms / 1000
        self.scope = hash_scope(source.cache_salt, source.lora_id)
        self.block_hashes: list[BlockHash] = []
        self.ledger = WaitLedger(now)
        self.admitted_at: float | None = None  # when it first got a row
        self.num_cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission
        self.first_miss: PrefixMiss | None = None
        self.num_charged_tokens = len(self.output_token_ids)  # those that its tenant was charged with
        # When it last lost its row; another engine had computed all but the last token of what it resumes from.
        resumed = len(source.resume_token_ids)
        self.num_computed_before = len(source.prompt_token_ids) + resumed - 1 if resumed else 0
        self.num_recomputed_tokens = 0
        self.num_preemptions = 0
        self.preempted_by: list[str] = []
        self.constraint: Constraint | None = None  # what holds it to its grammar, once that is compiled
        self.compiling: Future[CompiledGrammar] | None = None  # its grammar, from when it was asked for
        self.opening: Future[Constraint] | None = None  # what holds it to that, while it is made
        self.drafter: NgramDrafter | None = None  # what guesses its next tokens, once it has run
        self.num_failures = 0  # executor failures since its last new token

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still come."""
        return self.max_total_tokens - self.num_tokens

    @property
    def max_cached_tokens(self) -> int:
        """How many of its first tokens need not be computed if they are in the cache.

        The last known token must be, for the next one; what else its prompt is asked for needs more of it.
        """
        if self.source.pooling is not None and self.source.pooling.needs_whole_prompt:
            return 0
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs.next_position - 1
        return self.num_tokens - 1

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` - 1 of prompt and output taken together, without copying the rest."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(start - split, 0) : stop - split]

    def hash_blocks(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` blocks, which must be full. Computed once each."""
        hashes = self.block_hashes
        parent = hashes[-1] if hashes else ROOT
        for index in range(len(hashes), num_blocks):
            start, stop = index * block_size, (index + 1) * block_size
            parent = hash_block(parent, self.token_slice(start, stop), media_key(self.source.media, start, stop))
            hashes.append(parent)
        return hashes

    @property
    def sort_key(self) -> tuple[int, int]:
        """Who goes first: the smaller key. It never changes, so a preempted request comes back to its old place."""
        return (self.priority, self.arrival_index)

    def finish_reason(self) -> tuple[FinishReason, int | None] | None:
        """Whether the last output token ends the request: (finish_reason, stop_reason), or None to go on."""
        if not self.output_token_ids:
            return None
        token_id = self.output_token_ids[-1]
        if token_id in self.stop_token_ids and len(self.output_token_ids) > self.source.sampling_params.min_tokens:
            return ("stop", None if token_id in self.source.eos_token_ids else token_id)
        if self.constraint is not None and self.constraint.is_complete:
            return ("stop", None)
        if self.num_tokens >= self.max_total_tokens:
            return ("length", None)
        return None

    def output(
        self,
        first_index: int,
        logprobs: list[TokenLogprobs] | None,
        ended: tuple[FinishReason, int | None] | None = None,
        report: RequestReport | None = None,
    ) -> EngineOutput:
        """Its output tokens from `first_index` on, with why they ended it, if they did."""
        reason, stop_reason = (None, None) if ended is None else ended
        new_token_ids, cached = self.output_token_ids[first_index:], self.num_cached_tokens or 0
        return EngineOutput(
            self.request_id, first_index, new_token_ids, reason, stop_reason, logprobs, cached, report=report
        )

    def end_of_prompt(self, embedding: FloatArray | None, report: RequestReport) -> EngineOutput:
        """The only output of a request that wants nothing but its prompt computed."""
        if (embedding is None) is not (self.source.pooling is None):
            raise EngineError(f"a step brought no embedding for {self.request_id}, or one too many")
        reason: FinishReason = "length" if embedding is None else "stop"
        cached = self.num_cached_tokens or 0
        output = EngineOutput(
            self.request_id, 0, [], reason, num_cached_tokens=cached, report=report, embedding=embedding
        )
        return output if self.prompt_logprobs is None else self.with_prompt_logprobs(output)

    def with_prompt_logprobs(self, output: EngineOutput) -> EngineOutput:
        """The first output of a request, with the logprobs of its prompt, which are handed out by that."""
        assert self.prompt_logprobs is not None
        taken, self.prompt_logprobs = self.prompt_logprobs.take(self.num_prompt_tokens), None
        return msgspec.structs.replace(output, prompt_logprobs=taken)

    def report(self, now: float) -> RequestReport:
        """Where its time went, up to now."""
        wait_s, compute_s = self.ledger.read(now)
        miss, admitted_at = self.first_miss, self.admitted_at
        evicted_s = None
        if miss is not None and miss.evicted_at is not None and admitted_at is not None:
            evicted_s = admitted_at - miss.evicted_at
        return RequestReport(
            wall_s=now - self.ledger.arrived,
            compute_s=compute_s,
            wait_s={cause.name: wait_s[cause] for cause in WaitCause if wait_s[cause]},
            num_cached_tokens=self.num_cached_tokens or 0,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_preemptions=self.num_preemptions,
            preempted_by=list(self.preempted_by),
            first_miss=None if miss is None else miss.reason,
            first_miss_evicted_s=evicted_s,
        )


def check_source(source: EngineRequest, max_model_len: int) -> None:
    """Raises `InvalidRequestError` for a request that no engine of this context could run."""
    num_prompt_tokens = len(source.prompt_token_ids)
    if not num_prompt_tokens:
        raise InvalidRequestError("prompt: must hold at least one token.", "prompt")
    if num_prompt_tokens > max_model_len:
        raise InvalidRequestError(
            f"prompt: {num_prompt_tokens} tokens given, at most {max_model_len} are allowed: the model's context.",
            "prompt",
            "context_length_exceeded",
        )
    if num_prompt_tokens == max_model_len and source.pooling is None:
        raise InvalidRequestError(
            f"prompt: {num_prompt_tokens} tokens leave no room for an answer; the context is "
            f"{max_model_len} tokens, so at most {max_model_len - 1} are allowed.",
            "prompt",
            "context_length_exceeded",
        )
    for field, token_ids in (("prompt", source.prompt_token_ids), ("resume_token_ids", source.resume_token_ids)):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= _MAX_TOKEN_ID):
            raise InvalidRequestError(f"{field}: token ids must be from 0 to {_MAX_TOKEN_ID}.", field)
    if source.cache_salt is not None and not _is_text(source.cache_salt):
        raise InvalidRequestError("cache_salt: must be text that can be encoded.", "cache_salt")
    if source.grammar is not None:
        check_other_fields(source.grammar, source.sampling_params)
    if source.deadline_ms is not None and not 0 < source.deadline_ms <= _MAX_DEADLINE_MS:
        raise InvalidRequestError(
            f"deadline_ms: must be > 0 and at most {_MAX_DEADLINE_MS}, got {source.deadline_ms}.", "deadline_ms"
        )
    if not 0 < source.tenant_weight < float("inf"):
        raise InvalidRequestError(f"tenant_weight: must be > 0, got {source.tenant_weight}.", "tenant_weight")


def _is_text(text: str) -> bool:
    """Half of a surrogate pair is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
