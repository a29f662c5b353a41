"""The prompt of a chat request: its messages as the model reads them."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.errors import InvalidRequestError

from .backend import ServedModel
from .chat_template import render_chat
from .context import ApiContext, off_the_loop
from .encoding import tokenize, tokenize_any, tokenize_end
from .protocol import ChatCompletionRequest
from .protocol.generation import num_kept

_MOST_CHARS = 1 << 26  # that a model's own template may make of what a body holds
_CHARS_PER_TOKEN = 32  # that a stranger's template may render for each token of the context: texts have three to five


class ChatPrompt(NamedTuple):
    text: str
    token_ids: list[int]
    template: str  # its source


async def chat_prompt(
    context: ApiContext, served: ServedModel, request: ChatCompletionRequest, body: bytes, *, any_length: bool = False
) -> ChatPrompt:
    """Render the template and tokenize. Raises `InvalidRequestError`; unless `any_length`, for what cannot fit.

    `any_length`: the prompt is only counted (/tokenize), up to a limit of its own.

    A template that came with the request is a stranger's program, and is rendered where it can do no harm.
    """
    chat = await off_the_loop(body, lambda: request.conversation(served.chat.special_tokens))
    template = request.chat_template
    if template is not None and not context.limits.request_templates:
        raise InvalidRequestError(
            "chat_template: this service renders no templates of requests (its setting api.request_templates).",
            "chat_template",
            "unsupported",
        )
    if template is None:
        template = served.chat.template_for(tools=bool(chat.tools))
    if template is None:
        raise InvalidRequestError(
            f"messages: the model {served.name!r} has no chat template; use /v1/completions, or give a chat_template.",
            "messages",
        )
    if request.chat_template is None:
        text = await context.heavy_work.run(body, lambda: render_chat(template, chat, _MOST_CHARS))
    else:
        processor = served.input_processor
        max_chars = min(processor.max_chars, _CHARS_PER_TOKEN * processor.max_model_len)
        text = await context.templates.render(template, chat, max_chars)
    most_chars = context.limits.max_tokenize_chars if any_length else None
    token_ids = await context.heavy_work.run(text, lambda: _token_ids(served, request, text, most_chars))
    return ChatPrompt(text, token_ids, template)


def _token_ids(served: ServedModel, request: ChatCompletionRequest, text: str, max_chars: int | None) -> list[int]:
    """`max_chars`: where the prompt need not fit."""
    max_tokens = request.max_completion_tokens or request.max_tokens or 1
    most = num_kept(request.truncate_prompt_tokens, served.input_processor.max_model_len, max_tokens)
    special = request.add_special_tokens
    if most is not None:
        return tokenize_end(served, text, most, add_special_tokens=special)
    if max_chars is not None:
        return tokenize_any(served, text, param="messages", add_special_tokens=special, max_chars=max_chars)
    return tokenize(served, text, param="messages", add_special_tokens=special)
