"""POST /tokenize and POST /detokenize: what a model's tokenizer makes of texts, conversations and token ids."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequestError

from .answers import Detokenized, Tokenized
from .backend import Backend, ServedModel
from .chat_prompt import chat_prompt
from .context import ApiContext, json_response, off_the_loop, read_body
from .encoding import tokenize_any, tokenize_end
from .generation import find_model
from .limits import ApiLimits
from .parsing import decode_body, parse_request, validate_fields
from .protocol.generation import num_kept
from .protocol.tokenization import DetokenizeRequest, TokenizeChatRequest, TokenizePromptRequest
from .sse import unless_client_leaves

TokenizeRequest = TokenizePromptRequest | TokenizeChatRequest


async def tokenize_endpoint(http: Request, context: ApiContext) -> Response:
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: _parse(body, context))
    served = await model_or_default(context.backend, request.model)
    if isinstance(request, TokenizePromptRequest):
        token_ids = await context.heavy_work.run(body, lambda: _text_tokens(served, request, context.limits))
    else:
        preparation = chat_prompt(context, served, request.as_chat(), body, any_length=True)
        token_ids = (await unless_client_leaves(http.receive, preparation)).token_ids
    with_names = request.return_token_strs
    return await context.heavy_work.run(token_ids, lambda: _tokenized(served, token_ids, with_names=with_names))


async def detokenize_endpoint(http: Request, context: ApiContext) -> Response:
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(DetokenizeRequest, body, context.limits))
    served = await model_or_default(context.backend, request.model)
    return await context.heavy_work.run(body, lambda: _detokenized(served, request.tokens))


async def model_or_default(backend: Backend, name: str | None) -> ServedModel:
    """The named model, or the service's first one. Raises `ModelNotFoundError`."""
    return await find_model(backend, backend.models()[0].id if name is None else name)


def _tokenized(served: ServedModel, token_ids: list[int], *, with_names: bool) -> Response:
    names = served.tokenizer.convert_ids_to_tokens(token_ids) if with_names else None
    return json_response(Tokenized(len(token_ids), served.input_processor.max_model_len, token_ids, names))


def _detokenized(served: ServedModel, token_ids: list[int]) -> Response:
    """Raises `InvalidRequestError` on an id that the model does not have."""
    vocab_size = served.info.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"tokens: token ids must be from 0 to {vocab_size - 1}, got {token_id}.", "tokens"
            )
    return json_response(Detokenized(served.token_decoder.decode(token_ids, skip_special_tokens=False)))


def _text_tokens(served: ServedModel, request: TokenizePromptRequest, limits: ApiLimits) -> list[int]:
    """A text may be longer than the context: to know that is why one asks."""
    most = num_kept(request.truncate_prompt_tokens, served.input_processor.max_model_len, 1)
    text, special = request.prompt, request.add_special_tokens
    if most is not None:
        return tokenize_end(served, text, most, add_special_tokens=special)
    return tokenize_any(served, text, param="prompt", add_special_tokens=special, max_chars=limits.max_tokenize_chars)


def _parse(body: bytes, context: ApiContext) -> TokenizeRequest:
    data = decode_body(body)
    if "messages" in data and "prompt" not in data:
        return validate_fields(TokenizeChatRequest, data, context.limits)
    if "messages" in data:
        raise InvalidRequestError("messages: is given together with prompt; give one of them.", "messages")
    return validate_fields(TokenizePromptRequest, data, context.limits)
