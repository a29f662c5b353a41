"""/openapi.json: what every endpoint takes and answers, from the models that read the bodies and write the answers.

The handlers parse bodies themselves (for their errors and their limits), so FastAPI knows nothing of them. Here the
pydantic models of `protocol` become request schemas, with what `parsing` accepts besides, and the msgspec records of
`answers` and `output_items` become those of the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from pydantic import BaseModel

import quire
from quire.engine import sampling_params as bounds

from .answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    ErrorBody,
    ModelCard,
    ModelList,
    Tokenized,
)
from .health import EngineHealth, ModelHealth
from .output_items import Response, StreamEvent
from .parsing import HARMLESS, REFUSED
from .protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, scheduling
from .protocol.tokenization import DetokenizeRequest, TokenizeChatRequest, TokenizePromptRequest
from .readiness import Ready

Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"


class Version(msgspec.Struct):
    version: str


class Health(msgspec.Struct):
    status: str
    models: list[ModelHealth]
    engines: list[EngineHealth] = []


_BODY_ERRORS = (400, 401, 404, 413, 429, 500)
_ERRORS = {
    400: "The request cannot work; `param` names the field.",
    401: "No API key, or one that is not known.",
    404: "No such model or path.",
    408: "The request's own deadline has passed.",
    413: "The body is too large.",
    429: "The tenant has used up its requests or tokens for now (Retry-After says for how long).",
    500: "The service failed while it worked on the request.",
    503: "No room, or no engine (Retry-After says when to try again).",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method. `chunks` are what the events of its stream hold, where it has one."""

    path: str
    method: str
    summary: str
    answer: type[msgspec.Struct] | None = None
    request: tuple[type[BaseModel], ...] = ()
    chunks: tuple[type[msgspec.Struct], ...] = ()
    errors: tuple[int, ...] = ()


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "/v1/completions",
        "post",
        "Continue prompts.",
        Completion,
        (CompletionRequest,),
        (Completion,),
        (*_BODY_ERRORS, 408, 503),
    ),
    Endpoint(
        "/v1/chat/completions",
        "post",
        "Answer a conversation.",
        ChatCompletion,
        (ChatCompletionRequest,),
        (ChatChunk,),
        (*_BODY_ERRORS, 408, 503),
    ),
    Endpoint(
        "/v1/responses",
        "post",
        "Answer a conversation, of items, with items.",
        Response,
        (ResponsesRequest,),
        get_args(StreamEvent),
        (*_BODY_ERRORS, 408, 503),
    ),
    Endpoint(
        "/v1/embeddings",
        "post",
        "Turn texts into vectors.",
        Embeddings,
        (EmbeddingRequest,),
        errors=(*_BODY_ERRORS, 408, 503),
    ),
    Endpoint("/v1/models", "get", "The models served here.", ModelList, errors=(401,)),
    Endpoint("/v1/models/{model}", "get", "One of the models.", ModelCard, errors=(401, 404)),
    Endpoint(
        "/tokenize",
        "post",
        "The tokens of a text or of a conversation.",
        Tokenized,
        (TokenizePromptRequest, TokenizeChatRequest),
        errors=_BODY_ERRORS,
    ),
    Endpoint("/detokenize", "post", "The text of tokens.", Detokenized, (DetokenizeRequest,), errors=_BODY_ERRORS),
    Endpoint("/health", "get", "Whether engines make progress, model by model.", Health, errors=(503,)),
    Endpoint("/ready", "get", "Whether a request that came now would be answered.", Ready, errors=(503,)),
    Endpoint("/version", "get", "The version of Quire.", Version),
    Endpoint("/metrics", "get", "Numbers for Prometheus."),
)

# What the models check in code, where the schema would not show it.
_RANGES: dict[str, Schema] = {
    "n": {"minimum": 1, "maximum": 128},
    "best_of": {"minimum": 1, "maximum": 128},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": bounds.MAX_TOP_K},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": bounds.MIN_REPETITION_PENALTY, "maximum": bounds.MAX_REPETITION_PENALTY},
    "seed": {"minimum": -(2**63), "maximum": bounds.MAX_SEED},
    "logprobs": {"minimum": 0, "maximum": bounds.MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": bounds.MAX_LOGPROBS},
    "dimensions": {"minimum": 1},
    "messages": {"minItems": 1},
    "top_logprobs": {"minimum": 0, "maximum": bounds.MAX_LOGPROBS},
    "truncate_prompt_tokens": {"minimum": -1},
    "priority": {"minimum": -scheduling.MAX_PRIORITY, "maximum": scheduling.MAX_PRIORITY},
    "deadline_ms": {"minimum": 1, "maximum": scheduling.MAX_DEADLINE_MS},
    "cache_salt": {"minLength": 1, "maxLength": scheduling.MAX_SALT_CHARS},
    "session_id": {"minLength": 1, "maxLength": scheduling.MAX_SESSION_CHARS},
    "request_id": {"pattern": "^[!-~]{1,128}$"},
}
# Where a model allows what others do not.
_RANGES_OF: dict[type[BaseModel], dict[str, Schema]] = {
    CompletionRequest: {"max_tokens": {"minimum": 0, "description": "0 only with echo: the prompt and its scores."}},
}
_STOP = {"type": "string", "minLength": 1, "maxLength": bounds.MAX_STOP_CHARS}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TOKEN_IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}, "minItems": 1},
    ]
}
# Fields that are read by code of their own.
_WHOLE: dict[str, Schema] = {
    "prompt": _PROMPTS,
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": bounds.MAX_STOP_STRINGS}]},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": bounds.MAX_LOGIT_BIAS,
    },
}
_WHOLE_OF: dict[type[BaseModel], dict[str, Schema]] = {EmbeddingRequest: {"input": _PROMPTS}}


def document(endpoints: tuple[Endpoint, ...] = ENDPOINTS) -> Schema:
    """The whole document (OpenAPI 3.1)."""
    schemas: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    answers = {part for each in endpoints for part in (each.answer, *each.chunks) if part is not None} | {ErrorBody}
    ordered = sorted(answers, key=lambda record: record.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas |= components
    reference_of = dict(zip(ordered, references, strict=True))
    for endpoint in endpoints:
        operation = _operation(endpoint, reference_of, schemas)
        paths.setdefault(endpoint.path, {})[endpoint.method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": quire.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Where keys are set up."}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint, answers: dict[type, Schema], schemas: dict[str, Schema]) -> Schema:
    content: Schema = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        content = {"application/json": {"schema": answers[endpoint.answer]}}
    if endpoint.chunks:
        names = " or ".join(answers[chunk]["$ref"].rsplit("/", 1)[-1] for chunk in endpoint.chunks)
        end = ", then `data: [DONE]`" if len(endpoint.chunks) == 1 else ""
        text = f"Server-sent events: `data: ` and a {names} each{end}. With `stream: true`."
        content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    error = {"application/json": {"schema": answers[ErrorBody]}}
    operation: Schema = {
        "summary": endpoint.summary,
        "operationId": endpoint.method + endpoint.path.translate(str.maketrans("/{}", "___")),
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    operation["responses"] |= {
        str(status): {"description": _ERRORS[status], "content": error} for status in sorted(endpoint.errors)
    }
    if "{model}" in endpoint.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [name]
    if endpoint.request:
        references = [_request(model, schemas) for model in endpoint.request]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _request(model: type[BaseModel], schemas: dict[str, Schema]) -> Schema:
    """The schema of a body, put among the others."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    assert all(schemas.get(name, part) == part for name, part in parts.items()), "two schemas have one name"
    schemas |= parts
    required = schema.get("required", [])
    properties: dict[str, Schema] = schema["properties"]
    ranges = _RANGES | _RANGES_OF.get(model, {})
    for name, found in properties.items():
        read_apart = _WHOLE | _WHOLE_OF.get(model, {})
        found = read_apart.get(name) or _bounded(found, ranges.get(name, {}))
        properties[name] = found if name in required else _or_null(found)
    properties |= {name: {} for name in HARMLESS if name not in properties}
    properties |= {
        name: {"enum": [None, *refused.neutral], "description": refused.why}
        for name, refused in REFUSED.items()
        if name not in properties
    }
    schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _bounded(schema: Schema, bound: Schema) -> Schema:
    """With the bound on the part that is not null."""
    if not bound:
        return schema
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(part, bound) for part in schema["anyOf"]]}
    return schema if schema.get("type") in ("null", "boolean") else schema | bound


def _or_null(schema: Schema) -> Schema:
    """Null means that a field is not given."""
    parts = schema.get("anyOf", [{key: value for key, value in schema.items() if key not in ("default", "title")}])
    return {"anyOf": [*(part for part in parts if part != {"type": "null"}), {"type": "null"}]}
