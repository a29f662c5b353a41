"""Between the messages of `proto/quire_inference.proto` and the JSON of the HTTP API. Knows shapes, judges nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from quire.engine.errors import InvalidRequestError

from . import quire_inference_pb2 as pb

Json = dict[str, Any]


def generate_body(request: pb.GenerateRequest) -> tuple[str, Json]:
    """The path and the body that mean the same. Raises `InvalidRequestError` for a field that is not JSON."""
    body = _given(request, without=("prompt", "prompt_token_ids", "conversation", "stream"))
    body["stream"] = request.stream if request.HasField("stream") else True
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if request.WhichOneof("input") == "conversation":
        if request.HasField("logprobs"):
            body |= {"logprobs": True, "top_logprobs": request.logprobs}
        return "/v1/chat/completions", body | conversation_fields(request.conversation)
    if request.WhichOneof("input") == "prompt_token_ids":
        body["prompt"] = list(request.prompt_token_ids.ids)
    elif request.WhichOneof("input") == "prompt":
        body["prompt"] = request.prompt
    return "/v1/completions", body


def tokenize_body(request: pb.TokenizeRequest) -> Json:
    body = _given(request, without=("prompt", "conversation"))
    if request.WhichOneof("input") == "conversation":
        return body | conversation_fields(request.conversation)
    return body | ({"prompt": request.prompt} if request.WhichOneof("input") else {})


def conversation_fields(conversation: pb.Conversation) -> Json:
    return _given(conversation, without=("messages",)) | {
        "messages": [_given(message) | {"content": message.content} for message in conversation.messages]
    }


def _given(message: Any, without: tuple[str, ...] = ()) -> Json:
    """The fields that are set, by their names in JSON. A name that ends in `_json` holds JSON. Raises
    `InvalidRequestError` for one that does not, and for numbers that are none."""
    fields: Json = {}
    for field, value in message.ListFields():
        if field.name in without:
            continue
        if field.name.endswith("_json"):
            name = field.name.removesuffix("_json")
            fields[name] = _decoded(field.name, value)
        elif field.type == field.TYPE_DOUBLE and not math.isfinite(value):  # which JSON does not have
            raise InvalidRequestError(f"{field.name}: must be a finite number, got {value}.", field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            for each in value.values():
                if not math.isfinite(each):
                    raise InvalidRequestError(f"{field.name}: must hold finite numbers, got {each}.", field.name)
            fields[field.name] = {str(key): each for key, each in value.items()}
        else:
            fields[field.name] = list(value) if field.is_repeated else value
    return fields


def _decoded(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: is not valid JSON: {error}.", name, "invalid_json") from error


def generate_response(answer: Json) -> pb.GenerateResponse:
    """A whole answer or a chunk, of either endpoint."""
    response = pb.GenerateResponse(
        id=answer["id"],
        created=answer["created"],
        model=answer["model"],
        choices=[_choice(choice) for choice in answer["choices"]],
        prompt_token_ids=answer.get("prompt_token_ids"),
    )
    for choice in answer["choices"]:
        response.prompt_token_ids.extend(choice.get("prompt_token_ids", ()))
    usage = answer.get("usage")
    if usage:
        response.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=usage["prompt_tokens"],
                completion_tokens=usage["completion_tokens"],
                total_tokens=usage["total_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            )
        )
    return response


def _choice(choice: Json) -> pb.Choice:
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    stop_reason, report = choice.get("stop_reason"), choice.get("report")
    return pb.Choice(
        index=choice["index"],
        text=said.get("content") or "",
        reasoning=said.get("reasoning_content") or "",
        tool_calls_json=json.dumps(said["tool_calls"]) if said.get("tool_calls") else "",
        finish_reason=choice.get("finish_reason"),
        stop_reason=None if stop_reason is None else str(stop_reason),
        token_ids=choice.get("token_ids"),
        logprobs=_logprobs(choice.get("logprobs") or {}),
        report_json=None if report is None else json.dumps(report),
    )


def _logprobs(logprobs: Json) -> list[pb.TokenLogprob]:
    if "content" in logprobs:  # of a conversation
        return [
            pb.TokenLogprob(
                token=entry["token"],
                logprob=entry["logprob"],
                top=[pb.TopLogprob(token=top["token"], logprob=top["logprob"]) for top in entry["top_logprobs"]],
            )
            for entry in logprobs["content"] or ()
        ]
    columns = (logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [
        pb.TokenLogprob(
            token=token,
            logprob=logprob,
            top=[pb.TopLogprob(token=each, logprob=value) for each, value in (tops or {}).items()],
        )
        for token, logprob, tops in zip(*columns, strict=True)
    ]


def tokenize_response(answer: Json) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(**answer)
