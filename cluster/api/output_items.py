"""What POST /v1/responses answers: a list of items, each begun, added to and completed by events of a stream.

In OpenAI's shapes (`openai.types.responses`). The thought of a model is the content of an item `reasoning`, the text of
its answer that of a `message`, and each call is a `function_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine.outputs import RequestReport

from .answers import TokenLogprob
from .chat_reading import Reading
from .tools import Arguments, CallStart, Content, Event, IncrementalParser, Reasoning

Status = Literal["in_progress", "completed", "incomplete"]
# "stopped": by a stop string, which may be amid the arguments of a call.
End = Literal["completed", "incomplete", "stopped"]
# A list of `TokenLogprob`, which is encoded once, however often it is repeated.
Logprobs = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]
_NO_LOGPROBS = msgspec.Raw(b"[]")


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: Logprobs
    annotations: list[str] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText] = []
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """`summary` is empty, as the thought itself is there."""

    id: str
    content: list[ReasoningText] = []
    status: Status = "in_progress"
    summary: list[str] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


Item = MessageItem | ReasoningItem | FunctionCallItem


# The answer around the items


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # which OpenAI charges for apart


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class Response(msgspec.Struct):
    """`report` is ours. What the request has given is encoded when it comes."""

    id: str
    created_at: int
    model: str
    instructions: msgspec.Raw
    metadata: msgspec.Raw
    reasoning: msgspec.Raw
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    max_output_tokens: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[Item] = []
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"
    report: RequestReport | UnsetType | None = UNSET


# Events. `sequence_number` is given when one is sent.


class ResponseEvent(msgspec.Struct):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response
    sequence_number: int = 0


class ItemEvent(msgspec.Struct):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item
    sequence_number: int = 0


class PartEvent(msgspec.Struct):
    type: Literal["response.content_part.added", "response.content_part.done"]
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    content_index: int = 0
    sequence_number: int = 0


class DeltaEvent(msgspec.Struct):
    """`content_index` and `logprobs` as the type has them."""

    type: Literal[
        "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"
    ]
    output_index: int
    item_id: str
    delta: str
    content_index: int | UnsetType = UNSET
    logprobs: Logprobs | UnsetType = UNSET
    sequence_number: int = 0


class TextDoneEvent(msgspec.Struct):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    output_index: int
    item_id: str
    text: str
    content_index: int = 0
    logprobs: Logprobs | UnsetType = UNSET
    sequence_number: int = 0


class ArgumentsDoneEvent(msgspec.Struct):
    output_index: int
    item_id: str
    name: str
    arguments: str
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int = 0


StreamEvent = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | TextDoneEvent | ArgumentsDoneEvent


class OutputWriter:
    """Writes one answer as items. What its events say of an item joins to the item.

    `new_id` makes the id of the item at an index, of a given kind; the same each time, as a stream may be resumed.
    """

    def __init__(self, reading: Reading, new_id: Callable[[str, int], str]) -> None:
        self._parser = reading.new()
        self._new_id = new_id
        self.items: list[Item] = []  # the last one may be at work
        self._pieces: list[str] = []  # of its text or arguments
        self._logprobs: list[bytes] = []

    @property
    def parser(self) -> IncrementalParser | None:
        return self._parser

    def push(
        self, text: str, logprobs: Sequence[TokenLogprob] = (), *, ends: End | None = None
    ) -> Iterator[StreamEvent]:
        """What a piece of the text adds. `ends`: it is the last one, and how the answer ends with it.

        An event must be encoded before the next is asked for: the item in it goes on. Logprobs are for answers that
        are a message and nothing else."""
        encoded = msgspec.json.encode(logprobs)[1:-1]
        for event in self._events(text, encoded, ends is not None):
            match event:
                case Content(piece):
                    if not isinstance(self._last, MessageItem):
                        yield from self._begin(MessageItem(self._new_id("msg", len(self.items))))
                    yield self._text_delta(piece, encoded)
                case Reasoning(piece):
                    if not isinstance(self._last, ReasoningItem):
                        yield from self._begin(ReasoningItem(self._new_id("rs", len(self.items))))
                    yield self._text_delta(piece, b"")
                case CallStart(name):
                    index = len(self.items)
                    yield from self._begin(
                        FunctionCallItem(self._new_id("fc", index), self._new_id("call", index), name)
                    )
                case Arguments(piece):
                    self._pieces.append(piece)
                    yield DeltaEvent("response.function_call_arguments.delta", *self._where, piece)
        if ends is not None:
            if not self.items:  # the model had nothing to say
                yield from self._begin(MessageItem(self._new_id("msg", 0)))
            yield from self.end(ends)

    def _events(self, text: str, logprobs: bytes, is_last: bool) -> Iterable[Event]:
        if self._parser is None:
            return [Content(text)] if text or logprobs else []
        return [*self._parser.push(text), *(self._parser.finish() if is_last else ())]

    @property
    def _last(self) -> Item | None:
        return self.items[-1] if self.items else None

    @property
    def _where(self) -> tuple[int, str]:
        return len(self.items) - 1, self.items[-1].id

    def _begin(self, item: Item) -> Iterator[StreamEvent]:
        yield from self.end("completed")
        self.items.append(item)
        yield ItemEvent("response.output_item.added", len(self.items) - 1, item)
        if not isinstance(item, FunctionCallItem):
            empty = OutputText("", _NO_LOGPROBS) if isinstance(item, MessageItem) else ReasoningText("")
            yield PartEvent("response.content_part.added", *self._where, empty)

    def _text_delta(self, piece: str, logprobs: bytes) -> StreamEvent:
        self._pieces.append(piece)
        if isinstance(self._last, ReasoningItem):
            return DeltaEvent("response.reasoning_text.delta", *self._where, piece, 0)
        if logprobs:
            self._logprobs.append(logprobs)
        return DeltaEvent("response.output_text.delta", *self._where, piece, 0, msgspec.Raw(b"[%b]" % logprobs))

    def end(self, how: End) -> Iterator[StreamEvent]:
        """No more comes of the last item."""
        if self._last is None:
            return
        status: Status = "incomplete" if how == "incomplete" else "completed"
        text, self._pieces = "".join(self._pieces), []
        match self._last:
            case MessageItem() as item:
                logprobs = msgspec.Raw(b"[%b]" % b",".join(self._logprobs))
                self._logprobs = []
                yield TextDoneEvent("response.output_text.done", *self._where, text, logprobs=logprobs)
                item.content = [OutputText(text, logprobs)]
                yield PartEvent("response.content_part.done", *self._where, item.content[0])
            case ReasoningItem() as item:
                yield TextDoneEvent("response.reasoning_text.done", *self._where, text)
                item.content = [ReasoningText(text)]
                yield PartEvent("response.content_part.done", *self._where, item.content[0])
            case FunctionCallItem() as item:
                item.arguments = text
                if how == "stopped" and not _is_json(text):
                    status = "incomplete"
                yield ArgumentsDoneEvent(*self._where, item.name, text)
        item.status = status
        yield ItemEvent("response.output_item.done", len(self.items) - 1, item)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
