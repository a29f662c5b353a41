"""The prompt of a chat request: its messages as the model reads them."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.errors import InvalidRequestError

from .backend import ServedModel
from .chat_template import render_chat
from .context import ApiContext, off_the_loop
from .generation import tokenize
from .protocol import ChatCompletionRequest

_MOST_CHARS = 1 << 26  # of a prompt of which most is cut off


class ChatPrompt(NamedTuple):
    text: str
    token_ids: list[int]
    template: str  # its source


async def chat_prompt(
    context: ApiContext, served: ServedModel, request: ChatCompletionRequest, body: bytes, *, any_length: bool = False
) -> ChatPrompt:
    """Render the template and tokenize. Raises `InvalidRequestError`; unless `any_length`, for what cannot fit.

    A template that came with the request is a stranger's program, and is rendered where it can do no harm.
    """
    chat = await off_the_loop(body, lambda: request.conversation(served.chat.special_tokens))
    template = request.chat_template
    if template is None:
        template = served.chat.template_for(tools=bool(chat.tools))
    if template is None:
        raise InvalidRequestError(
            f"messages: the model {served.name!r} has no chat template; use /v1/completions, or give a chat_template.",
            "messages",
        )
    any_length = any_length or request.truncate_prompt_tokens is not None
    if request.chat_template is None:
        text = await off_the_loop(body, lambda: render_chat(template, chat, _MOST_CHARS))
    else:
        max_chars = _MOST_CHARS if any_length else served.input_processor.max_chars
        text = await context.templates.render(template, chat, max_chars)
    token_ids = await off_the_loop(body, lambda: _token_ids(served, request, text, will_be_cut=any_length))
    return ChatPrompt(text, token_ids, template)


def _token_ids(served: ServedModel, request: ChatCompletionRequest, text: str, *, will_be_cut: bool) -> list[int]:
    token_ids = tokenize(
        served, text, param="messages", add_special_tokens=request.add_special_tokens, will_be_cut=will_be_cut
    )
    max_tokens = request.max_completion_tokens or request.max_tokens or 1
    return request.truncated(token_ids, served.input_processor.max_model_len, max_tokens)
