"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import MAX_LOGPROBS, SamplingParams

from ..chat_template import Conversation
from ..tools.tool_set import ToolSet
from .fields import at_most, check_length
from .generation import GenerationRequest
from .messages import MAX_MESSAGES, ChatMessage, conversation
from .tools import MAX_TOOLS, Tool, ToolChoice, tool_set

MAX_DOCUMENTS = 1024
MAX_TEMPLATE_KWARGS = 64


def _few_kwargs(value: object) -> object:
    if isinstance(value, dict):
        check_length(value, MAX_TEMPLATE_KWARGS)
    return value


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
TemplateVariables = Annotated[dict[str, Any], BeforeValidator(_few_kwargs)]


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Annotated[list[Tool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    documents: Annotated[list[dict[str, Any]] | None, at_most(MAX_DOCUMENTS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    echo: bool = False

    def sampling_params(self, defaults: dict[str, float], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves. Raises `InvalidRequestError`."""
        if self.top_logprobs and not self.logprobs:  # 0 asks for nothing
            raise InvalidRequestError("top_logprobs: is allowed only when logprobs is true.", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs: must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}.", "top_logprobs"
            )
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequestError(
                f"max_tokens: must be the same as max_completion_tokens where both are given, got {self.max_tokens}.",
                "max_tokens",
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(self._checked(field, room) or room, logprobs, defaults)

    def tool_set(self) -> ToolSet | None:
        """What the answer may call, if anything. Raises `InvalidRequestError`."""
        return tool_set(self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls)

    def conversation(self, special_tokens: dict[str, str]) -> Conversation:
        """What the chat template reads. Tools that must not be called are not shown. Raises `InvalidRequestError`."""
        messages = conversation(self.messages)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message: is not allowed together with add_generation_prompt.", "continue_final_message"
            )
        for field in ("continue_final_message", "echo"):
            if getattr(self, field) and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
                raise InvalidRequestError(f"{field}: needs a final message of role 'assistant' with content.", field)
        tools = self.tools if self.tools and self.tool_choice != "none" else None
        prompted = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return Conversation(
            messages=messages,
            tools=None if tools is None else [tool.template_tool() for tool in tools],
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            variables=self.chat_template_kwargs or {},
            special_tokens=special_tokens,
            add_generation_prompt=prompted,
            continue_final_message=self.continue_final_message,
            own_template=self.chat_template is not None,
        )

    def echoed_text(self) -> str:
        """What stands before each answer: the final message, where the user wants to see it again."""
        content = self.messages[-1].content if self.echo else None
        return "\n".join(content) if isinstance(content, list) else content or ""
