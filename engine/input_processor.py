"""From what a user asks to what an engine runs: tokens, resolved limits, a seed, one request per choice."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from .bad_words import TokenSequences, bad_word_sequences
from .errors import InvalidRequestError
from .grammar.request_fields import check_other_fields
from .grammar.spec import GrammarSpec
from .outputs import EngineRequest
from .pooling import PoolingParams
from .sampling_params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from .model_source import ModelInfo


_NO_ANSWER = SamplingParams(max_tokens=0)


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is to the scheduler, beside its tokens. Names as in `EngineRequest`."""

    priority: int = 0
    deadline_ms: int | None = None
    tenant: str = ""
    tenant_weight: float = 1.0
    cache_salt: str | None = None
    grammar: GrammarSpec | None = None
    session_id: str | None = None


class InputProcessor:
    """Turns prompts into engine requests for one model.

    Requests without a seed draw one from `seed`, or from the operating system when that is None. `tokenize` may be
    called from any thread; `process` belongs to one.
    """

    def __init__(self, info: ModelInfo, tokenizer: Any, *, seed: int | None = None) -> None:
        self.info = info
        self.max_model_len: int = info.max_model_len  # prompt + answer, in tokens; lowered where an engine holds less
        self._backend = tokenizer.backend_tokenizer
        self._longest_token = max(map(len, self._backend.get_vocab()))  # characters, at least as many as it stands for
        # The prompts of one request have the same bad words, and so have most requests of one client.
        self._bad_word_sequences = lru_cache(maxsize=64)(
            lambda words: bad_word_sequences(words, partial(self.tokenize, add_special_tokens=False))
        )
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    @property
    def max_chars(self) -> int:
        """Characters beyond which no text fits into the context."""
        return self.max_model_len * self._longest_token

    def check_length(self, text: str, param: str = "prompt") -> None:
        """Refuse a text that cannot fit, before its tokenization costs seconds. Raises `InvalidRequestError`."""
        limit = self.max_chars
        if len(text) > limit:
            raise InvalidRequestError(
                f"{param}: {len(text)} characters given, more than {limit} never fit into the model's context of "
                f"{self.max_model_len} tokens.",
                param,
                "context_length_exceeded",
            )

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A rendered chat template has its special tokens already: pass False for it."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def process(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        param: str = "prompt",
        options: RequestOptions = RequestOptions(),  # noqa: B008 - it is immutable
    ) -> list[EngineRequest]:
        """The `params.n` requests of one prompt: `id`, `id-1`, `id-2`, ... with one seed and choice_index 0, 1, 2, ...

        `max_tokens` is cut to what the context leaves (all of it for None). `param` is the name under which the user
        gave the prompt. Raises `InvalidRequestError` naming the field.
        """
        prompt_token_ids = self.tokenize(prompt) if isinstance(prompt, str) else _integers(prompt, param)
        room = self.room_after(prompt_token_ids, param)
        resolved = self._resolve(params, room)
        # What a prompt is like is said once, with its first choice.
        further = resolved
        if resolved.prompt_logprobs is not None:
            further = msgspec.structs.replace(resolved, prompt_logprobs=None)
        grammar = options.grammar
        if grammar is None and params.structured_outputs is not None:
            grammar = params.structured_outputs.spec()
        if grammar is not None:
            check_other_fields(grammar, resolved)
        seed = params.seed if params.seed is not None else self._random.randint(0, MAX_SEED)
        return [
            EngineRequest(
                request_id=request_id if choice == 0 else f"{request_id}-{choice}",
                prompt_token_ids=prompt_token_ids,
                sampling_params=resolved if choice == 0 else further,
                seed=seed,
                choice_index=choice,
                eos_token_ids=tuple(self.info.eos_token_ids),
                priority=options.priority,
                deadline_ms=options.deadline_ms,
                tenant=options.tenant,
                tenant_weight=options.tenant_weight,
                cache_salt=options.cache_salt,
                grammar=grammar,
                session_id=options.session_id,
            )
            for choice in range(params.n)
        ]

    def process_embedding(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        pooling: PoolingParams | None = None,
        *,
        param: str = "prompt",
        options: RequestOptions = RequestOptions(),  # noqa: B008 - it is immutable
    ) -> EngineRequest:
        """The request that embeds one prompt, pooled as the model does where `pooling` does not say otherwise.

        Raises `InvalidRequestError` naming the field.
        """
        prompt_token_ids = self.tokenize(prompt) if isinstance(prompt, str) else _integers(prompt, param)
        self.check_prompt(prompt_token_ids, param, 0)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=_NO_ANSWER,
            seed=0,
            pooling=self._resolve_pooling(pooling),
            **{field: getattr(options, field) for field in RequestOptions.__struct_fields__},
        )

    def _resolve_pooling(self, pooling: PoolingParams | None) -> PoolingParams:
        if pooling is None:
            return self.info.pooling
        size = self.info.hidden_size
        if pooling.dimensions is not None and size is not None and pooling.dimensions > size:
            raise InvalidRequestError(
                f"dimensions: must be an integer from 1 to {size}, the model's own size, got {pooling.dimensions}.",
                "dimensions",
            )
        return pooling

    def room_after(self, prompt_token_ids: Sequence[int], param: str = "prompt") -> int:
        """Tokens that the context leaves for the answer, at least 1. Raises `InvalidRequestError`."""
        self.check_prompt(prompt_token_ids, param, 1)
        return self.max_model_len - len(prompt_token_ids)

    def check_prompt(self, prompt_token_ids: Sequence[int], param: str, num_answer_tokens: int) -> None:
        """Raise `InvalidRequestError` where a prompt is empty, not of this vocabulary, or leaves too little room."""
        if not prompt_token_ids:
            raise InvalidRequestError(f"{param}: must hold at least one token, got none.", param)
        most = self.max_model_len - num_answer_tokens
        if len(prompt_token_ids) > most:
            needed = ", and one is needed for the answer" if num_answer_tokens else ""
            raise InvalidRequestError(
                f"{param}: {len(prompt_token_ids)} tokens given, at most {most} are allowed: the "
                f"model's context is {self.max_model_len} tokens{needed}.",
                param,
                "context_length_exceeded",
            )
        vocab_size = self.info.vocab_size
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
            bad = next(token_id for token_id in prompt_token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequestError(f"{param}: token ids must be from 0 to {vocab_size - 1}, got {bad}.", param)

    def _resolve(self, params: SamplingParams, room: int) -> SamplingParams:
        vocab_size = self.info.vocab_size
        for field, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            if token_ids and max(token_ids) >= vocab_size:
                raise InvalidRequestError(
                    f"{field}: token ids must be from 0 to {vocab_size - 1}, got {max(token_ids)}.", field
                )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens: must be at most {room}, the tokens that the context leaves after this prompt, "
                f"got {params.min_tokens}.",
                "min_tokens",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sequences = self._bad_word_sequences(params.bad_words) if params.bad_words else ()
        _check_some_allowed(params.allowed_token_ids, sequences)
        resolved = {"max_tokens": max_tokens, "bad_words_token_ids": sequences, "structured_outputs": None}
        if all(getattr(params, field) == value for field, value in resolved.items()):
            return params
        return msgspec.structs.replace(params, **resolved)


def _check_some_allowed(allowed_token_ids: Sequence[int] | None, bad_words: TokenSequences) -> None:
    """Raise `InvalidRequestError` where each allowed token is a bad word of its own: nothing could ever be said."""
    if allowed_token_ids is not None and {sequence[0] for sequence in bad_words if len(sequence) == 1}.issuperset(
        allowed_token_ids
    ):
        raise InvalidRequestError("allowed_token_ids: every token given is one of bad_words.", "allowed_token_ids")


def _integers(token_ids: Sequence[int], param: str) -> list[int]:
    """A copy as Python integers, whatever integers were given (NumPy's, say)."""
    try:
        return array("q", list(token_ids)).tolist()
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"{param}: token ids must be integers ({error}).", param) from error
