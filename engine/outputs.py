"""The records that cross a process or a step, and those that users receive.

Engines speak tokens only; text appears in `RequestOutput` and `CompletionOutput` alone. A running request occupies a
*row*, a small integer below `max_num_seqs` that the scheduler gives it at admission and takes back when it finishes or
is preempted. Workers know rows, not requests: their state is arrays indexed by row.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidRequestError, QuireError
from .grammar.spec import GrammarSpec
from .pooling import PoolingParams
from .sampling_params import SamplingParams

# Why a prefix was not in the cache. "not_read": the request needs what only computing its prompt brings.
MissReason = Literal["never_seen", "evicted", "salt_differs", "too_short", "not_read"]
FinishReason = Literal["stop", "length", "abort", "error", "deadline"]
T = TypeVar("T")
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Prompt positions whose content is not their token ids but a medium (an image, say), named by its hash."""

    offset: int
    length: int
    content_hash: bytes


class ResumeTag(msgspec.Struct, frozen=True, array_like=True):
    """By which a client can have an interrupted stream go on. Engines keep it, and do not read it.

    `key` is the same for the same request of the same client, `index` says which of its answers this is. `answer_id`
    and `created` are what the client was told about the answer. The client may have begun the same request more than
    once: `attempt` says which beginning this goes on from, `num_resumes` how often it has gone on since.
    """

    key: bytes
    index: int
    answer_id: str
    created: int
    attempt: str = ""
    num_resumes: int = 0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request as an engine receives it: validated, tokenized, and with everything that decides its tokens.

    `seed` is the user's or one drawn at intake, so that any engine continues with the same tokens. `choice_index` tells
    the `n` choices of one prompt apart. `resume_token_ids` are output tokens that the client side already has: the
    engine computes them again and goes on after them (its first output has `first_index == len(resume_token_ids)`).
    `max_tokens` in `sampling_params` is already resolved against the context length. `deadline_ms` counts from the
    arrival at the engine. `tenant` is who the request is for (an API key): tenants share the engine by `tenant_weight`.
    `grammar` is what the output must match; it is compiled before the request gets its turn. `cache_salt`, `lora_id`
    and `media` decide, beside the tokens, what its blocks hold: only requests that agree in them share a prefix.
    With `pooling` there is no answer: the request ends with an embedding when its prompt is computed.
    `session_id` says which requests belong together (a conversation, a user): a hint for the choice of an engine,
    which engines do not read.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    choice_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    resume_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str | None = None
    lora_id: str | None = None
    media: tuple[MediaSpan, ...] = ()
    deadline_ms: int | None = None
    tenant: str = ""
    tenant_weight: float = 1.0
    grammar: GrammarSpec | None = None
    session_id: str | None = None
    pooling: PoolingParams | None = None
    resume_tag: ResumeTag | None = None

    @property
    def max_num_tokens(self) -> int:
        """Positions that it needs of a context, at most."""
        if self.pooling is not None:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) + (self.sampling_params.max_tokens or 1)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one output position, of the raw distribution. `top` is ordered from the likeliest."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest token of the vocabulary
    top: list[tuple[int, float]]  # (token_id, logprob)


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of consecutive prompt tokens, of the raw distribution; K likeliest tokens each."""

    first_position: int  # in the prompt; position 0 has none
    token_ids: IntArray  # [m, 1 + K] the prompt's own token, then the likeliest in order
    logprobs: FloatArray  # [m, 1 + K]
    ranks: IntArray  # [m] of the prompt's own token, 1 is the likeliest


class RequestReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time of a request went, and what the cache did for it. `compute_s` and `wait_s` sum to `wall_s`."""

    wall_s: float
    compute_s: float
    wait_s: dict[str, float]  # by `WaitCause`, those that are not 0
    num_cached_tokens: int = 0  # at first admission
    num_recomputed_tokens: int = 0  # computed again after preemption or a failure
    num_preemptions: int = 0
    preempted_by: list[str] = []  # request ids, the last few
    first_miss: MissReason | None = None  # None: not admitted yet
    first_miss_evicted_s: float | None = None  # how long before admission the missed block was evicted


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """That an error is the request's own fault (`InvalidRequestError`), found only after it was taken in."""

    param: str | None = None
    code: str | None = None


class EngineOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request. `first_index` is the output index of the first: receiving one twice is harmless."""

    request_id: str
    first_index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id (or string) that ended it; None for EOS
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    error: str | None = None
    report: RequestReport | None = None  # with the finish reason
    refusal: Refusal | None = None  # with an error
    prompt_logprobs: PromptLogprobs | None = None  # of the whole prompt, with the first output that computes it
    embedding: FloatArray | None = None  # [dimensions], with the finish reason of a request with `pooling`

    @classmethod
    def last(
        cls, request_id: str, first_index: int, reason: FinishReason, error: QuireError | None, report: RequestReport
    ) -> EngineOutput:
        """The end of a request that no token brings."""
        refusal = Refusal(error.param, error.code) if isinstance(error, InvalidRequestError) else None
        message = None if error is None else error.message
        return cls(request_id, first_index, [], reason, error=message, report=report, refusal=refusal)


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters (or enters again) a row: everything a worker has to know, written over what was there."""

    row: int
    request_id: str
    token_ids: list[int]  # prompt and the output tokens known so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    choice_index: int
    eos_token_ids: tuple[int, ...]  # for min_tokens
    block_ids: tuple[list[int], ...]  # per KV cache group
    first_prompt_logprob: int | None = None  # prompt position from which on logprobs are wanted
    pooling: PoolingParams | None = None  # nothing is sampled, the prompt becomes an embedding


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to the table of a row: `block_table[group][row, offset:offset + len(block_ids)] = block_ids`."""

    row: int
    group: int
    offset: int
    block_ids: list[int]


class GrammarMasks(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that may come next in rows with a grammar: token t is bit t % 32 of word t // 32."""

    indices: IntArray  # [m] positions in the batch, ascending; each of them samples in this step
    allowed: IntArray  # [m, ceil(vocab_size / 32)]


class DraftTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Guesses at what follows the last known token of some rows, which this step checks."""

    indices: IntArray  # [m] positions in the batch, ascending; each of them samples in this step
    token_ids: IntArray  # [m, k]; -1 pads at the end

    @property
    def counts(self) -> IntArray:
        """[m] the drafts of each, at least 1."""
        counts: IntArray = (self.token_ids >= 0).sum(axis=1, dtype=np.int32)
        return counts


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. The three arrays are in batch order and say which tokens of which rows are computed.

    Row `rows[i]` computes the tokens at positions `num_computed_tokens[i] ... + num_scheduled_tokens[i] - 1`. Where
    that reaches the row's last known token, the worker samples the next one and appends it to its own copy of the row,
    so that a later step in flight can compute it. `released_rows` are free from this step on (finished or preempted);
    they are applied before `new_rows` of the same step write them again.

    The last tokens of a row with `drafts` are those: they follow its last known token, are counted in
    `num_scheduled_tokens`, and become tokens of the row as far as the worker samples the same ones. It samples one
    token after the last known one and one after each draft. Such a row is in no other step before its result is back.

    In a pipeline only the last stage samples. There, `last_token_ids` tells every stage the token at the last position
    of each row that samples in this step, and a row waits until what it sampled before is back.
    """

    step_id: int
    rows: IntArray  # [num_reqs]
    num_scheduled_tokens: IntArray  # [num_reqs], each >= 1
    num_computed_tokens: IntArray  # [num_reqs]
    new_rows: list[NewRow] = []
    block_updates: list[BlockUpdate] = []
    released_rows: list[int] = []
    grammar: GrammarMasks | None = None
    last_token_ids: IntArray | None = None  # [num_reqs], -1 for rows that do not sample; None without a pipeline
    drafts: DraftTokens | None = None  # never in a pipeline

    @property
    def total_num_scheduled_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class BatchLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of the rows that asked for them; K is the most that any of them asked for."""

    indices: IntArray  # [m] positions in the batch, ascending; once for each token that was sampled there
    token_ids: IntArray  # [m, 1 + K] the sampled token, then the likeliest in order
    logprobs: FloatArray  # [m, 1 + K]
    sampled_ranks: IntArray  # [m] rank of the sampled token, 1 is the likeliest


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step produced, in batch order. -1 where a row sampled nothing (its prompt is not finished).

    Of a row with drafts, the tokens sampled after its last known token and after those drafts that were right.
    """

    step_id: int
    sampled_token_ids: IntArray  # [num_reqs, 1 + most drafts]; -1 pads at the end
    logprobs: BatchLogprobs | None = None
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []  # (index in the batch, of the tokens that it computed)
    embeddings: list[tuple[int, FloatArray]] = []  # (index in the batch, [dimensions]) of the prompts that it finished


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of an engine at a step boundary; the counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_by_cause: dict[str, int] = {}  # those that are not 0, by what the requests lack now
    num_blocks: int = 0  # usable blocks
    num_used_blocks: int = 0  # referenced by a request
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens asked for
    prefix_cache_hits: int = 0  # tokens found
    prefix_cache_ghost_hits: int = 0  # further tokens that a cache of twice the size would have found
    num_evictions: int = 0  # cached blocks lost
    num_waiting_tokens: int = 0
    num_deadlines_missed: int = 0
    num_recoveries: dict[str, int] = {}  # ranks rebuilt, by what had happened to them (`ExecutorError.cause`)
    recovery_s: float = 0.0  # spent on it: no request got a token meanwhile
    num_resumed_requests: int = 0  # taken up with tokens of their own: from a lost rank, or from another engine
    num_recomputed_tokens: int = 0  # computed again, after preemption or a failure
    num_uncomputed_tokens: int = 0  # known tokens of running requests that no step has computed yet
    num_draft_tokens: int = 0  # guessed, and computed to be checked
    num_accepted_tokens: int = 0  # those of them that were right

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests refer to, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a prompt. With streaming in deltas, `text`, `token_ids` and `logprobs` hold what is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why it could not be finished, with finish_reason "error" or "deadline"


class RequestOutput(msgspec.Struct, kw_only=True):
    """What a user receives for one prompt: `n` answers, in order of `index`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token; None for the first


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """What a user receives for one prompt that was embedded."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: FloatArray  # [dimensions]
    num_cached_tokens: int = 0


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"{type(value)} cannot be sent")


def _dec_hook(_type: Any, value: Any) -> Any:
    dtype, shape, data = value
    array = np.frombuffer(data, dtype=np.dtype(dtype))
    if array.dtype.kind not in "if" or len(shape) > 3:
        raise ValueError(f"an array of {dtype} and shape {shape} is not part of any record")
    return array.reshape(shape)


def wire_encoder() -> msgspec.msgpack.Encoder:
    """An encoder for the records of this module (msgpack; arrays as dtype, shape and bytes)."""
    return msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def wire_decoder(type_: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A decoder for one record type. Raises `msgspec.ValidationError` on anything else; never unpickles."""
    return msgspec.msgpack.Decoder(type_, dec_hook=_dec_hook)
