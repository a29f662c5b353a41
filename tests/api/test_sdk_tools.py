"""The official SDK with tools and thoughts: its types, its stream helper, its parsing of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer
from pydantic import BaseModel
from test_chat_tools import TOOL

from quire.cluster.api.chat_style import TEMPLATES

MODEL = "smollm2-135m-instruct"
MESSAGES: Any = [{"role": "user", "content": "Weather in Paris?"}]
EXTRA = {"chat_template": (TEMPLATES / "hermes.jinja").read_text()}
ARGUMENTS = '{"city": "Paris", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


PARSED = openai.pydantic_function_tool(GetWeather, name="get_weather")


@pytest.fixture
def server(live_server: LiveServer, served: Any) -> LiveServer:
    def reset() -> None:
        live_server.backend.__init__(served, f"Let me see.\n{CALL}\n{CALL}")  # type: ignore[misc]

    live_server.call(reset)
    return live_server


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_conversation_with_tools(sdk: openai.OpenAI, server: LiveServer) -> None:
    """Each answer goes back as the SDK holds it."""
    answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], extra_body=EXTRA)  # type: ignore[list-item]
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls if call.type == "function"] == [ARGUMENTS] * 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sun."} for call in choice.message.tool_calls]
    messages: Any = [*MESSAGES, choice.message, *results]
    again = sdk.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], extra_body=EXTRA)  # type: ignore[list-item]
    assert again.choices[0].finish_reason == "tool_calls"
    prompt = server.backend.served.token_decoder.decode(server.backend.requests[-1].prompt_token_ids)
    assert prompt.count("<tool_response>\nSun.\n</tool_response>") == 2


def test_the_stream_helper_parses_arguments(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[PARSED], extra_body=EXTRA) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    [choice] = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.tool_calls is not None
    calls = [call.function for call in choice.message.tool_calls]
    assert [call.parsed_arguments for call in calls] == [GetWeather(city="Paris", days=2)] * 2
    assert events.count("tool_calls.function.arguments.done") == 2
    assert events.count("tool_calls.function.arguments.delta") > 10
    # And the answer of a stream goes back, too.
    messages: Any = [
        *MESSAGES,
        choice.message,
        *[{"role": "tool", "tool_call_id": c.id, "content": "Sun."} for c in choice.message.tool_calls],
    ]
    assert sdk.chat.completions.create(model=MODEL, messages=messages, extra_body=EXTRA).choices


def test_parse(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[PARSED], extra_body=EXTRA)
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris", days=2)


async def test_async(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=[PARSED], tool_choice="required", extra_body=EXTRA
        ) as stream:
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert calls[1].function.parsed_arguments == GetWeather(city="Paris", days=2)
        chunks = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            parallel_tool_calls=False,
            stream=True,
            extra_body=EXTRA,
        )
        names = [
            call.function.name
            async for chunk in chunks
            for call in chunk.choices[0].delta.tool_calls or []
            if call.id and call.function
        ]
        assert names == ["get_weather"] * 2  # whatever the backend answers: engines hold to the grammar


def test_reasoning(sdk: openai.OpenAI, server: LiveServer, served: Any) -> None:
    def think() -> None:
        server.backend.__init__(served, "<think>\nHm.\n</think>\n\nYes.")  # type: ignore[misc]

    server.call(think)
    extra = {"chat_template": "{{ messages[0].content }}<think></think>"}
    answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens
    deltas: list[Any] = [
        chunk.choices[0].delta
        for chunk in sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=extra)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
