"""POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import FailFast, create_model

from .chat import ChatCompletionRequest
from .fields import StrictModel

# What decides the prompt of a conversation: these fields of a chat completion mean the same here.
_PROMPT_FIELDS = frozenset(
    [
        "messages",
        "tools",
        "tool_choice",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
    ]
)


class TokenizePromptRequest(StrictModel):
    """The tokens of a text. Without `model` it is the service's first one."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    return_token_strs: bool = False


class _TokenizeChat(StrictModel):
    model: str | None = None
    return_token_strs: bool = False

    def as_chat(self) -> ChatCompletionRequest:
        """The conversation as a chat completion would hold it."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set & _PROMPT_FIELDS}
        return ChatCompletionRequest.model_construct(set(fields), model=self.model or "", **fields)


if TYPE_CHECKING:

    class TokenizeChatRequest(_TokenizeChat):
        messages: list[Any]
else:
    TokenizeChatRequest = create_model(
        "TokenizeChatRequest",
        __base__=_TokenizeChat,
        __doc__="The tokens of a conversation, as the model's chat template renders it.",
        **{
            name: (field.annotation, field)
            for name, field in ChatCompletionRequest.model_fields.items()
            if name in _PROMPT_FIELDS
        },
    )


class DetokenizeRequest(StrictModel):
    """The text of tokens."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
