"""Which formats there are, and which one a chat template teaches."""

from __future__ import annotations

from typing import Protocol

from .events import Parser
from .harmony import Harmony
from .hermes import Hermes
from .lark import CallGrammar, Lark
from .llama_json import LlamaJson
from .mistral import Mistral
from .pythonic import Pythonic
from .qwen_coder import QwenCoder
from .tool_set import ToolSet


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """What the parser looks for and may be a special token, which is otherwise left out of the text."""
        ...

    @property
    def reads_thoughts(self) -> bool:
        """Thoughts are parts of the format: it reads answers without tools, too."""
        ...

    def parser(self, tools: ToolSet) -> Parser:
        """Finds the calls in one answer."""
        ...

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        """What calls look like whose arguments follow their schemas; `parser` reads them.

        Raises `InvalidRequestError` for a schema that the format has no words for.
        """
        ...


FORMATS: dict[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (Hermes(), LlamaJson(), Pythonic(), Mistral(), QwenCoder(), Harmony())
}


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template writes earlier calls in, or tells the model to use. None: none that is known."""

    def has(*parts: str) -> bool:
        return all(part in template for part in parts)

    if has("<|channel|>", "<|message|>"):
        return FORMATS["harmony"]
    if has("<function=", "<parameter="):
        return FORMATS["qwen3_coder"]
    if has("[TOOL_CALLS]"):
        return FORMATS["mistral"]
    if has("<tool_call>") and not has("<arg_key>"):  # GLM writes arguments in a way of its own
        return FORMATS["hermes"]
    if has("<|python_start|>") or has("func_name1("):
        return FORMATS["pythonic"]
    if has("ipython", '"parameters"'):
        return FORMATS["llama3_json"]
    return None
