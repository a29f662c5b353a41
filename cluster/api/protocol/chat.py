"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, FailFast

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import MAX_LOGPROBS, SamplingParams

from .fields import StrictModel, at_most, check_length, wrong
from .generation import GenerationRequest

MAX_MESSAGES = 32768  # whatever a service allows
MAX_CONTENT_PARTS = 1024


def _joined_text(value: object) -> object:
    """Content as one text: a string, or a list of text parts (joined by newlines)."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    check_length(value, MAX_CONTENT_PARTS)
    texts = []
    for part in value:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise wrong(f"parts of type {part['type'][:40]!r} are not supported yet, only 'text' is")
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)):
            raise wrong("every part must be an object {type: 'text', text: a string}")
        texts.append(part["text"])
    return "\n".join(texts)


def _no_value_yet(value: object) -> object:
    if value not in (None, []):
        raise wrong("is not supported yet")
    return None


# What clients send back from an earlier answer, where it held nothing.
NotYet = Annotated[None, BeforeValidator(_no_value_yet)]


class ChatMessage(StrictModel):
    """One message. Tool calls come later; what clients echo of an answer without any is accepted."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_joined_text)] = None
    name: str | None = None
    refusal: NotYet = None
    audio: NotYet = None
    annotations: NotYet = None
    function_call: NotYet = None
    tool_calls: NotYet = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def sampling_params(self, defaults: dict[str, float], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves. Raises `InvalidRequestError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs: is allowed only when logprobs is true.", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs: must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}.", "top_logprobs"
            )
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(self._checked(field, room) or room, logprobs, defaults)

    def template_messages(self) -> list[dict[str, str]]:
        """Messages as chat templates read them. Raises `InvalidRequestError`."""
        if not self.messages:
            raise InvalidRequestError("messages: must hold at least one message.", "messages")
        return [self._template_message(i, message) for i, message in enumerate(self.messages)]

    @staticmethod
    def _template_message(i: int, message: ChatMessage) -> dict[str, str]:
        if message.content is None:
            raise InvalidRequestError(f"messages[{i}].content: is required.", f"messages[{i}].content")
        # OpenAI renamed the role; templates know the old name.
        rendered = {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        return rendered if message.name is None else {**rendered, "name": message.name}
