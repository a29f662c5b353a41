"""Answers of the OpenAI API, in its exact shapes. Encoded by msgspec; a chunk of a stream costs a microsecond.

`UNSET` leaves a field out. What an answer may have a million of is no work for the garbage collector (`gc=False`).
`stop_reason`, `token_ids`, `prompt_token_ids`, `prompt_logprobs` and `max_model_len` are vLLM's additions, `report` is
ours.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine.outputs import FinishReason, RequestReport


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of models that think before they answer


ChatFinishReason = FinishReason | Literal["tool_calls"]

# Text completions


class CompletionLogprobs(msgspec.Struct):
    """Four lists with one entry per token. Offsets count characters of `text`."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # None for the first token of a prompt, which nothing precedes
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, gc=False):
    """Of one token at a position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


# By token id, for every position; None for the first, which nothing precedes.
PromptLogprobsByToken = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    report: RequestReport | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsByToken | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """A whole answer, or one chunk of a stream: OpenAI gives both the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


# Chat completions


class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """`content` is null where there is nothing but calls or a thought."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    report: RequestReport | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsByToken | UnsetType | None = UNSET


class CalledFunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """`id`, `type` and the name come with the first of a call."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    report: RequestReport | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first one


# Tokens of texts (vLLM's shapes)


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


# Embeddings


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str  # base64 of little-endian float32
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


# Models


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None  # None while neither the model's files nor an engine could tell
    object: Literal["model"] = "model"
    owned_by: str = "quire"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


# Errors


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail
