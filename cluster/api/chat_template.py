"""From a conversation to the text that a model reads."""

from __future__ import annotations

import hashlib
import string
from typing import Any

import jinja2
import msgspec

from quire.engine.errors import InvalidRequestError

from .template_env import CompiledTemplate, compile_template

_CONTINUED = "\ue000\ue0c0\ue001"  # private characters: nobody's text, and no filter changes them
_MESSAGE_CHARS = 200

# What the request has fields of its own for, or the server says itself.
_RESERVED = frozenset(["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"])


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a chat template may read. Contents are strings, or lists of the texts of their parts.

    `own_template`: the template came with the request.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    variables: dict[str, Any] = {}  # `chat_template_kwargs`
    special_tokens: dict[str, str] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    own_template: bool = False


def render_chat(source: str, chat: Conversation, max_chars: int) -> str:
    """The prompt's text. Raises `InvalidRequestError` on what the template does not take or cannot make."""
    blamed = "chat_template" if chat.own_template else "messages"
    try:
        compiled = compile_template(source)
    except Exception as error:  # anybody's text: whatever jinja, its parser and Python's compiler raise
        raise InvalidRequestError(f"{blamed}: the chat template cannot be read: {_said(error)}", blamed) from error
    _check_taken(compiled, chat)
    messages = [_as_wanted(message, compiled) for message in chat.messages]
    if "[TOOL_CALLS]" in source:
        messages = [_with_short_ids(message) for message in messages]
    if chat.continue_final_message:
        messages[-1] = {**messages[-1], "content": _with_end_mark(messages[-1]["content"])}
    variables: dict[str, Any] = {
        **chat.special_tokens,
        **chat.variables,
        "messages": messages,
        "tools": chat.tools,
        "documents": chat.documents,
        "add_generation_prompt": chat.add_generation_prompt,
    }
    if chat.reasoning_effort is not None:
        variables["reasoning_effort"] = chat.reasoning_effort
    try:
        text = _rendered(compiled.template, variables, max_chars, blamed)
    except InvalidRequestError:
        raise
    except Exception as error:  # a template is a program: it can fail in any way
        _check_arguments(messages)
        what = "fails" if chat.own_template else "refuses them"
        raise InvalidRequestError(f"{blamed}: the chat template {what}: {_said(error)}", blamed) from error
    _check_characters(text, blamed)
    return _cut_at_end_mark(text) if chat.continue_final_message else text


def _check_arguments(messages: list[dict[str, Any]]) -> None:
    """Where a template fails, arguments that are no JSON object are likely why: some walk them. Raises
    `InvalidRequestError`."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                param = f"messages[{i}].tool_calls[{j}].function.arguments"
                why = "must be a string that holds a JSON object, as the chat template of this model reads it"
                raise InvalidRequestError(f"{param}: {why}.", param)


def _check_taken(compiled: CompiledTemplate, chat: Conversation) -> None:
    """Refuse, by name, what the template would ignore. Raises `InvalidRequestError`."""
    names = compiled.names
    if chat.tools and "tools" not in names:
        raise InvalidRequestError(
            "tools: the chat template of this model does not know tools; a service can be given one that does, by its "
            "setting chat_template (`hermes` comes with Quire).",
            "tools",
            "unsupported",
        )
    for i, message in enumerate(chat.messages):
        if "tool_calls" in message and not compiled.shows_calls:
            param = f"messages[{i}].tool_calls"
            raise InvalidRequestError(f"{param}: the chat template of this model does not show calls.", param)
    for field, value in (("documents", chat.documents), ("reasoning_effort", chat.reasoning_effort)):
        if value and field not in names:
            raise InvalidRequestError(
                f"{field}: the chat template of this model does not take it.", field, "unsupported"
            )
    for name in chat.variables:
        param = f"chat_template_kwargs.{name[:80]}"
        if name in _RESERVED or name in chat.special_tokens:
            raise InvalidRequestError(f"{param}: must be given as a field of its own, or not at all.", param)
        if name not in names:
            raise InvalidRequestError(f"{param}: the chat template does not read it.", param, "unsupported")


def _rendered(template: jinja2.Template, variables: dict[str, Any], max_chars: int, blamed: str) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > max_chars:
            raise InvalidRequestError(
                f"{blamed}: the prompt has more than {max_chars} characters, which never fit into the model's context.",
                blamed,
                "context_length_exceeded",
            )
    return "".join(pieces)


def _check_characters(text: str, blamed: str) -> None:
    """A template can write half of a surrogate pair, which no tokenizer takes. Raises `InvalidRequestError`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise InvalidRequestError(
            f"{blamed}: the chat template makes {found}, half of a UTF-16 surrogate pair, which is not a character.",
            blamed,
        ) from error


def _as_wanted(message: dict[str, Any], compiled: CompiledTemplate) -> dict[str, Any]:
    """A message with its content as the template reads it."""
    content = message["content"]
    if compiled.content_format == "string":
        return {**message, "content": content if isinstance(content, str) else "\n".join(content)}
    if isinstance(content, str) and compiled.takes_strings:
        return message
    texts = [content] if isinstance(content, str) else content
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Mistral's templates insist on ids of nine letters and digits; OpenAI's clients hand back what they were given."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
    return changed


def _short_id(given: str) -> str:
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    letters = string.ascii_letters + string.digits
    return "".join(letters[byte % len(letters)] for byte in hashlib.sha256(given.encode()).digest()[:9])


def _with_end_mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + _CONTINUED
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUED}] if content else content


def _cut_at_end_mark(text: str) -> str:
    """The text up to the end of the final message."""
    end = text.rfind(_CONTINUED)
    if end < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the final message's content as it is.",
            "continue_final_message",
        )
    return text[:end]


def _said(error: Exception) -> str:
    text = str(error).encode(errors="replace").decode() or type(error).__name__
    return f"{text[:_MESSAGE_CHARS].rstrip('.')}."
