"""How the text of a chat answer is read: which part is thought, which is said, which calls a tool."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET

from quire.engine.errors import InvalidRequestError
from quire.engine.output_processor import RequestState

from .answers import AssistantMessage, CalledFunction, CalledFunctionDelta, ChatDelta, ToolCall, ToolCallDelta
from .backend import ServedModel
from .chat_prompt import ChatPrompt
from .protocol import ChatCompletionRequest
from .reasoning import ReasoningMarks, plain, with_reasoning
from .tools import Arguments, CallStart, Content, Event, IncrementalParser, Parser, Reasoning, ToolFormat, ToolSet


@dataclass(frozen=True, slots=True)
class Reading:
    """How every answer to one request is read. Without a parser all of it is content."""

    parser: Parser | None
    mark_ids: frozenset[int] = frozenset()  # special tokens that the parser has to see
    hidden: frozenset[str] = frozenset()  # their texts, where users do not see special tokens
    tools: ToolSet | None = None
    tool_format: ToolFormat | None = None
    marks: ReasoningMarks | None = None
    inside: bool = False  # the answer begins within a thought
    token_ids: dict[str, int] = field(default_factory=dict)  # of marks that are tokens to llguidance, not text
    finds_thoughts: bool = False

    def new(self) -> IncrementalParser | None:
        """A parser for one answer."""
        return None if self.parser is None else IncrementalParser(self.parser, hidden=self.hidden)


def reading_of(served: ServedModel, request: ChatCompletionRequest, prompt: ChatPrompt) -> Reading:
    """Raises `InvalidRequestError` when nobody knows how the model writes tool calls."""
    tools = request.tool_set()
    known = served.chat.format_of(prompt.template)
    if known is not None and known.reads_thoughts:
        return _reading_of_all(served, request, known, tools)
    tool_format = known if tools is not None else None
    if tools is not None and tool_format is None:
        raise InvalidRequestError(
            "tools: the chat template tells no format of tool calls that is known here; a service can be told one by "
            "its setting tool_parser.",
            "tools",
            "unsupported",
        )
    marks = served.chat.marks_of(prompt.template)
    if tool_format is None and marks is None:
        return Reading(None)
    parser = plain if tool_format is None or tools is None else tool_format.parser(tools)
    inside = marks is not None and _begins_inside(marks, request, prompt)
    if marks is not None:
        parser = with_reasoning(marks, parser, inside=inside)
    texts = (*(tool_format.marks if tool_format else ()), *((marks.start, marks.end) if marks else ()))
    special, hidden = _special(served, request, texts)
    added = served.token_decoder.added_ids(texts)
    token_ids = {text: i for text, i in added.items() if text in special or (text[0] == "<" and text[-1] == ">")}
    found = marks is not None
    return Reading(parser, frozenset(special.values()), hidden, tools, tool_format, marks, inside, token_ids, found)


def _reading_of_all(
    served: ServedModel, request: ChatCompletionRequest, known: ToolFormat, tools: ToolSet | None
) -> Reading:
    """By a format that reads thoughts and answers as well as calls."""
    special, hidden = _special(served, request, known.marks)
    return Reading(
        known.parser(tools or ToolSet({})),
        frozenset(special.values()),
        hidden,
        tools,
        None if tools is None else known,
        token_ids=served.token_decoder.added_ids(known.marks),
        finds_thoughts=True,
    )


def _special(
    served: ServedModel, request: ChatCompletionRequest, marks: tuple[str, ...]
) -> tuple[dict[str, int], frozenset[str]]:
    """Marks that are special tokens, with their ids; and those of them that the user does not see."""
    special = served.token_decoder.special_ids(marks)
    return special, frozenset() if request.skip_special_tokens is False else frozenset(special)


def _begins_inside(marks: ReasoningMarks, request: ChatCompletionRequest, prompt: ChatPrompt) -> bool:
    if request.continue_final_message:
        content = request.messages[-1].content
        text = "\n".join(content) if isinstance(content, list) else content or ""
        return text.rfind(marks.start) > text.rfind(marks.end)
    return marks.opened_by(prompt.text)


class MessageWriter:
    """Writes one answer as the API has it: whole, or as the deltas of a stream, which join to the same.

    `echo` is a text that stands before it.
    """

    __slots__ = ("_call", "_echo", "_include_reasoning", "_parser")

    def __init__(self, reading: Reading, *, echo: str = "", include_reasoning: bool = True) -> None:
        self._parser = reading.new()
        self._echo = echo
        self._include_reasoning = include_reasoning
        self._call = -1  # index of the current one

    @property
    def made_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    @property
    def parser(self) -> IncrementalParser | None:
        return self._parser

    def first_delta(self) -> ChatDelta:
        """The role. Where the content may be nothing at all it begins as nothing."""
        return ChatDelta("assistant", "" if self._parser is None else None)

    def delta(self, text: str, *, finished: bool) -> ChatDelta:
        """What a piece of the text adds."""
        delta = ChatDelta()
        for event in self._events(text, finished=finished):
            match event:
                case Content(piece):
                    delta.content = (delta.content or "") + piece
                case Reasoning(piece):
                    delta.reasoning_content = (delta.reasoning_content or "") + piece
                case CallStart(name):
                    self._call += 1
                    function = CalledFunctionDelta(name=name, arguments="")
                    _calls(delta).append(ToolCallDelta(self._call, function, new_call_id(), "function"))
                case Arguments(piece):
                    calls = _calls(delta)
                    if not calls or calls[-1].index != self._call:
                        calls.append(ToolCallDelta(self._call, CalledFunctionDelta(arguments="")))
                    calls[-1].function.arguments += piece
        return delta

    def whole(self, text: str) -> AssistantMessage:
        """The message of a complete text."""
        content: list[str] = [] if self._parser is not None else [""]
        thought: list[str] = []
        calls: list[tuple[str, list[str]]] = []
        for event in self._events(text, finished=True):
            match event:
                case Content(piece):
                    content.append(piece)
                case Reasoning(piece):
                    thought.append(piece)
                case CallStart(name):
                    calls.append((name, []))
                case Arguments(piece):
                    calls[-1][1].append(piece)
        message = AssistantMessage("".join(content) if content else None)
        if thought:
            message.reasoning_content = "".join(thought)
        if calls:
            message.tool_calls = [
                ToolCall(new_call_id(), CalledFunction(name, "".join(arguments))) for name, arguments in calls
            ]
        return message

    def _events(self, text: str, *, finished: bool) -> Iterable[Event]:
        if self._echo:
            echo, self._echo = self._echo, ""
            yield Content(echo)
        if self._parser is None:
            if text:
                yield Content(text)
            return
        for event in (*self._parser.push(text), *(self._parser.finish() if finished else ())):
            if self._include_reasoning or not isinstance(event, Reasoning):
                yield event


def num_thought_tokens(parser: IncrementalParser | None, state: RequestState) -> int:
    """Tokens of an answer so far that are a thought, by what has read its text."""
    if parser is None or not (parser.thinks or parser.thought_end):
        return 0
    return len(state.token_ids) if parser.thinks else state.num_tokens_of(parser.thought_end)


def _calls(delta: ChatDelta) -> list[ToolCallDelta]:
    if delta.tool_calls is UNSET:
        delta.tool_calls = []
    return delta.tool_calls


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
