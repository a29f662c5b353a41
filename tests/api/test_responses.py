"""/v1/responses: what it sends to an engine is what chat completions send, and its streams are its whole answers."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend
from live_server import LiveServer, run_server
from pydantic import BaseModel
from test_chat_tools import ARGUMENTS, CALL, TOOL, answer

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.messages import ResumePoint
from quire.engine.config import ModelConfig
from quire.engine.errors import EngineError, OverloadedError
from quire.engine.model_source import load_model_info
from quire.engine.outputs import Refusal, RequestReport
from quire.engine.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
BODY: dict[str, Any] = {"model": MODEL, "input": "hi"}
FUNCTION = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
# Shows all that a message may have, as Qwen's does.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}{{ m.tool_call_id }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if reasoning_effort %}"
    "{{ reasoning_effort }}{% endif %}"
)
ANSWERS = {
    "text": DEFAULT_ANSWER,
    "thought": "<think>\nTwo and two.\n</think>\n\nIt is 4.",
    "calls": f"Let me see.\n{CALL}\n{CALL}",
    "thought, text, calls": f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}",
    "only a thought": "<think>\nHm",
    "nothing": "",
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    info = load_model_info(ModelConfig(max_model_len=1024))
    return ServedModel.create(info, load_tokenizer(info), config=ModelConfig(chat_template=str(path)))


@pytest.fixture
def backend(thinker: ServedModel) -> FakeBackend:
    return FakeBackend(thinker)


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    return data


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Ids and data of a stream, whose events are named as what they hold."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for lines in events:
        fields = dict(line.split(": ", 1) for line in lines.split("\n"))
        data = json.loads(fields["data"])
        assert data["type"] == fields["event"]
        found.append((fields.get("id", ""), data))
    return found


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/responses", json={**BODY, **fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [data for _, data in events_of(response.text)]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream by its deltas alone, each checked against what its end says."""
    items: list[dict[str, Any]] = []
    for event in copy.deepcopy(events):
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = items[-1]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.done":
                assert (event["name"], event["arguments"]) == (items[-1]["name"], items[-1]["arguments"])
            case "content_part.done":
                assert [event["part"]] == items[-1]["content"]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert event["item"] == items[-1]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items


def without_ids(value: Any) -> Any:
    """Ids and times differ from answer to answer."""
    if isinstance(value, dict):
        drawn = ("id", "call_id", "created_at", "completed_at")
        return {key: without_ids(each) for key, each in value.items() if key not in drawn}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


async def test_the_shape_of_a_response(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.num_cached_tokens = 2
    answer(backend, ANSWERS["thought"])
    given = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 100, "temperature": 0.5}
    body = await post(client, **given, tools=[FUNCTION], text={"format": {"type": "text"}})
    prompt = len(backend.requests[0].prompt_token_ids)
    thought, message = body.pop("output")
    assert body.pop("id").startswith("resp_")
    assert body.pop("completed_at") >= body.pop("created_at") > 1_700_000_000
    num_tokens = len(backend.answer_ids) + 1
    assert body.pop("usage") == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": len(ids_of(backend, ANSWERS["thought"].split("\n\nIt")[0]))},
        "total_tokens": prompt + num_tokens,
    }
    assert body == {
        **given,
        "object": "response",
        "status": "completed",
        "model": MODEL,
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [FUNCTION],
        "top_p": 1.0,
        "top_logprobs": 0,
    }
    assert thought.pop("id").startswith("rs_")
    assert thought == {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": "Two and two."}],
    }
    assert message.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "It is 4.", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "status": "completed", "role": "assistant", "content": [text]}


def ids_of(backend: FakeBackend, text: str) -> list[int]:
    return backend.served.input_processor.tokenize(text, add_special_tokens=False)


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("most", [None, 9])
async def test_a_stream_is_the_whole_answer(
    client: httpx.AsyncClient, backend: FakeBackend, text: str, tokens_per_step: int, most: int | None
) -> None:
    answer(backend, text)
    backend.tokens_per_step = tokens_per_step
    fields = {"tools": [FUNCTION], "max_output_tokens": most}
    whole = await post(client, **fields)
    events = await stream(client, **fields)
    begun, in_progress, *_, ended = events
    assert [begun["type"], in_progress["type"]] == ["response.created", "response.in_progress"]
    assert begun["response"] == in_progress["response"]
    assert (begun["response"]["status"], begun["response"]["output"]) == ("in_progress", [])
    assert begun["response"]["usage"] is None
    assert ended["type"] == f"response.{whole['status']}"
    assert without_ids(ended["response"]) == without_ids(whole)
    assert joined(events) == ended["response"]["output"]
    ids = [item["id"] for item in ended["response"]["output"]]
    assert len({*ids, ended["response"]["id"]}) == len(ids) + 1


@pytest.mark.parametrize(("text", "kinds"), [
    (ANSWERS["thought, text, calls"], ["reasoning", "message", "function_call", "function_call"]),
    ("", ["message"]),
])  # fmt: skip
async def test_items(client: httpx.AsyncClient, backend: FakeBackend, text: str, kinds: list[str]) -> None:
    answer(backend, text)
    body = await post(client, tools=[FUNCTION])
    assert [item["type"] for item in body["output"]] == kinds
    for call in body["output"][2:]:
        assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
        assert call["call_id"].startswith("call_")


async def test_what_is_cut_short_is_incomplete(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = await post(client, max_output_tokens=4)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["incomplete"]
    assert body["completed_at"] is None
    answer(backend, ANSWERS["calls"])
    body = await post(client, tools=[FUNCTION], max_output_tokens=30)
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize(("stop", "statuses", "arguments"), [
    ("Paulo", ["completed", "incomplete"], '{"city": "São '),
    ("</tool_call>", ["completed", "completed"], ARGUMENTS),
])  # fmt: skip
async def test_a_call_that_is_cut_by_a_stop_string_is_not_complete(
    client: httpx.AsyncClient, backend: FakeBackend, stop: str, statuses: list[str], arguments: str
) -> None:
    answer(backend, ANSWERS["calls"])
    body = await post(client, tools=[FUNCTION], stop=stop)
    assert [item["status"] for item in body["output"]] == statuses
    assert body["output"][1]["arguments"] == arguments


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "text": ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
    "instructions": (
        {"instructions": "Be brief.", "input": [{"role": "user", "content": "hi"}]},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    ),
    "parts": (
        {
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
                {"role": "assistant", "id": "msg_1", "status": "completed", "type": "message", "content": [
                    {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "no"},
                ]},
                {"role": "user", "content": "d"},
            ],
        },
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("c", "no")]},
            {"role": "user", "content": "d"},
        ],
    ),
    "a turn in four items": (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": "Let me see."},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}', "id": "fc_1"},
                {"type": "function_call", "call_id": "b", "name": "g", "arguments": "", "status": "completed"},
                {"type": "function_call_output", "call_id": "b", "output": "sun"},
                {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Ah."}], "encrypted_content": None},
                {"type": "function_call", "call_id": "c", "name": "g", "arguments": "{}"},
            ],
        },
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "reasoning_content": "Hm.",
                "content": "Let me see.",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                    {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "b", "content": "sun"},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {
                "role": "assistant",
                "reasoning_content": "Ah.",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "g", "arguments": "{}"}}],
            },
        ],
    ),
    "texts between calls": (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": [{"type": "output_text", "text": t} for t in ("b", "c")]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": " Ah."}]},
                {"type": "function_call_output", "call_id": "a", "output": "sun"},
            ]
        },
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "a"},
            {
                "role": "assistant",
                "reasoning_content": "Hm. Ah.",
                "content": "b\ncd",
                "tool_calls": [
                    {"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ("a", "b")
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "sun"},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_an_engine_is_asked_what_chat_completions_ask(
    client: httpx.AsyncClient, backend: FakeBackend, name: str
) -> None:
    """The same prompt, sampling and grammar, in the words of both."""
    items, messages = CONVERSATIONS[name]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": "x", "top_k": 5, "logit_bias": {"5": 1.5}}
    parameters = FUNCTION["parameters"]
    await post(
        client,
        **items,
        **sampling,
        max_output_tokens=50,
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        tools=[{"type": "function", "name": "f", "parameters": parameters, "strict": True, "description": "F."}],
        include=["reasoning.encrypted_content"],
    )
    function = {"name": "f", "parameters": parameters, "strict": True, "description": "F."}
    chat = {
        "model": MODEL,
        "messages": messages,
        **sampling,
        "max_completion_tokens": 50,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "tools": [{"type": "function", "function": function}],
    }
    response = await client.post("/v1/chat/completions", json=chat)
    assert response.status_code == 200, response.text
    mine, other = backend.requests
    assert mine.prompt_token_ids == other.prompt_token_ids
    assert (mine.sampling_params, mine.grammar, mine.seed) == (other.sampling_params, other.grammar, other.seed)
    assert mine.grammar is not None


REFUSED: dict[str, dict[str, Any]] = {
    "input": {"input": 5},
    "input ": {"input": []},
    "input[0]": {"input": ["a"]},
    "input[0] ": {"input": [{"type": "web_search_call", "id": "ws_1"}]},
    "input[0]  ": {"input": [{"type": [], "role": "user", "content": "a"}]},
    "input[128]": {
        "input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"} for _ in range(129)]
    },
    "input[0].role": {"input": [{"role": "tool", "content": "a"}]},
    "input[0].content": {"input": [{"role": "user"}]},
    "input[0].content ": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "input[0].color": {"input": [{"role": "user", "content": "a", "color": "red"}]},
    "input[0].encrypted_content": {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
    "input[1].call_id": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call_output", "call_id": "nobody's", "output": "b"},
        ]
    },
    "input[0].arguments": {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
    "max_output_tokens": {"max_output_tokens": 5000},
    "max_output_tokens ": {"max_output_tokens": 0},
    "temperature": {"temperature": 3},
    "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "n"}}},
    "text.format.schema ": {"text": {"format": {"type": "text", "schema": {"type": "object"}}}},
    "text.format.strict": {"text": {"format": {"type": "json_object", "strict": True}}},
    "text.format.name": {"text": {"format": {"type": "json_schema", "schema": {}}}},
    "text.verbosity": {"text": {"verbosity": "low"}},
    "reasoning.effort": {"reasoning": {"effort": "enormous"}},
    "tools[0]": {"tools": [{"type": "web_search"}]},
    "tools[1].name": {"tools": [FUNCTION, FUNCTION]},
    "tool_choice": {"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]},
    "tool_choice ": {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    "top_logprobs": {"top_logprobs": 3},
    "include": {"include": ["file_search_call.results"]},
    "include ": {"include": ["message.output_text.logprobs"]},  # of a model that thinks
    "previous_response_id": {"previous_response_id": "resp_1"},
    "conversation": {"conversation": "conv_1"},
    "background": {"background": True},
    "store": {"store": True},
    "truncation": {"truncation": "auto"},
    "metadata": {"metadata": {"a": 5}},
    "stop": {"stop": ["a"] * 17},
    "structured_outputs": {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
    "max_tokens": {"max_tokens": 5},
    "messages": {"messages": []},
    "n": {"n": 2},
}


@pytest.mark.parametrize("param", REFUSED)
async def test_what_cannot_work_is_refused_by_its_name(
    client: httpx.AsyncClient, backend: FakeBackend, param: str
) -> None:
    for streamed in (False, True):
        response = await client.post("/v1/responses", json={**BODY, **REFUSED[param], "stream": streamed})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param.strip()
        assert error["message"].startswith(f"{param.strip()}: ")
        assert "response_format" not in error["message"]
    assert backend.requests == []


async def test_options_of_a_stream_are_refused_without_one(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/responses", json={**BODY, "stream_options": {"include_obfuscation": False}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


async def test_mistakes_in_long_conversations_are_told_where_they_are(client: httpx.AsyncClient) -> None:
    """A template that walks arguments fails on what is no object: the item is named, not the message it became."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "5"}
    template = TEMPLATE.replace("{{ call | tojson }}", "{% for k, v in call.function.arguments.items() %}{% endfor %}")
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {**call, "arguments": "{}"}, call]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "chat_template": template}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    served = create_app(backend_with(template))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://api") as http:
        error = (await http.post("/v1/responses", json={**BODY, "input": items})).json()["error"]
    assert error["param"] == "input[3].arguments"
    assert error["message"].startswith("input[3].arguments: must be a string that holds a JSON object")


def backend_with(template: str) -> FakeBackend:
    info = load_model_info(ModelConfig(max_model_len=1024))
    tokenizer = load_tokenizer(info)
    tokenizer.chat_template = template
    return FakeBackend(ServedModel.create(info, tokenizer))


async def test_logprobs(served: ServedModel) -> None:
    """Those of chat completions, whole and joined from a stream."""
    transport = httpx.ASGITransport(create_app(FakeBackend(served)))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
        expected = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        [message] = (await post(http, **asked))["output"]
        assert message["content"][0]["logprobs"] == expected
        assert len(expected) > 10
        events = await stream(http, **asked)
        assert joined(events)[0]["content"][0]["logprobs"] == expected
        [message] = (await post(http, include=asked["include"]))["output"]
        assert all(each["top_logprobs"] == [] for each in message["content"][0]["logprobs"])


async def test_a_stream_that_fails_says_so(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.failure = "The engine broke."
    *_, delta, failed = await stream(client)
    assert delta["type"] == "response.output_text.delta"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine broke."}
    backend.late_refusal = Refusal("response_format", "unsupported")
    backend.failure = "response_format: cannot be compiled."
    failed = (await stream(client))[-1]
    error = {"code": "invalid_prompt", "message": "text.format: cannot be compiled."}
    assert failed["response"]["error"] == error
    whole = await client.post("/v1/responses", json=BODY)
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "text.format")
    backend.failure = RuntimeError("a secret")
    failed = (await stream(client))[-1]
    assert failed["type"] == "response.failed"
    assert "secret" not in json.dumps(failed)
    [message] = failed["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", " The year")  # what had been sent


async def test_before_the_first_token_errors_have_a_status(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for refusal, status in ((OverloadedError("Full.", 2.0), 503), (EngineError("Broken."), 500)):
        backend.refusal = refusal
        response = await client.post("/v1/responses", json={**BODY, "stream": True})
        assert (response.status_code, response.json()["error"]["message"]) == (status, str(refusal))


async def test_a_report_comes_with_the_end(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.report = RequestReport(wall_s=1.0, compute_s=1.0, wait_s={})
    assert (await post(client, include_report=True))["report"]["wall_s"] == 1.0
    assert (await stream(client, include_report=True))[-1]["response"]["report"]["wall_s"] == 1.0
    assert "report" not in await post(client)


@pytest.mark.parametrize("text", [ANSWERS["text"], ANSWERS["thought, text, calls"]], ids=["text", "items"])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_a_stream_goes_on_where_it_was_interrupted(
    client: httpx.AsyncClient, backend: FakeBackend, text: str, tokens_per_step: int
) -> None:
    """After any event: the same events and ids that would have followed, and numbers go on. An engine may take several
    tokens in a step, and others the second time."""
    answer(backend, text)
    backend.tokens_per_step = tokens_per_step
    body = {**BODY, "tools": [FUNCTION], "stream": True}

    async def ask(headers: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
        response = await client.post("/v1/responses", json=body, headers={"x-request-id": "mine", **headers})
        assert response.status_code == 200, response.text
        return events_of(response.text)

    whole = await ask({})
    assert whole[-1][1]["type"] == "response.completed"
    [request] = backend.requests
    assert request.resume_tag is not None
    for index, (last, _) in enumerate(whole):
        if not last:
            continue
        known = backend.answer_ids[: (100, 2)[index % 2]]
        backend.remembered = {request.resume_tag.key: [ResumePoint(request.resume_tag, request.seed, known)]}
        rest = await ask({"Last-Event-ID": last})
        if tokens_per_step == 1:
            assert without_times(rest) == without_times(whole[index + 1 :])
        seen = [event for _, event in whole[: index + 1]]
        assert joined([*seen, *(event for _, event in rest)]) == whole[-1][1]["response"]["output"]
        numbers = [event["sequence_number"] for event in seen] + [event["sequence_number"] for _, event in rest]
        assert numbers == [*range(len(numbers))]


def without_times(events: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    for _, event in events:
        event.get("response", {}).pop("completed_at", None)
    return events


# OpenAI's SDK


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest.fixture(scope="module")
def thinking_server(thinker: ServedModel) -> Iterator[LiveServer]:
    with run_server(thinker) as server:
        yield server


@pytest.fixture
def sdk(thinking_server: LiveServer) -> Iterator[openai.OpenAI]:
    says(thinking_server, DEFAULT_ANSWER)
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(server: LiveServer, text: str) -> None:
    server.call(lambda: server.backend.__init__(server.backend.served, text))  # type: ignore[misc]


def test_the_sdk(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input="hi", store=False, reasoning={"summary": "auto"}, user="ann")
    assert (response.output_text, response.status) == (DEFAULT_ANSWER, "completed")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    again: Any = [{"role": "user", "content": "hi"}, *response.output, {"role": "user", "content": "and?"}]
    assert sdk.responses.create(model=MODEL, input=again).output_text == DEFAULT_ANSWER
    deltas = [
        event.delta
        for event in sdk.responses.create(model=MODEL, input="hi", stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert len(deltas) > 5
    assert "".join(deltas) == DEFAULT_ANSWER
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported")


def test_the_sdk_with_tools_and_thoughts(sdk: openai.OpenAI, thinking_server: LiveServer) -> None:
    """A loop as agents have it: what an answer consists of goes back as it came, with the results."""
    says(thinking_server, ANSWERS["thought, text, calls"])
    tools: Any = [openai.pydantic_function_tool(GetWeather, name="get_weather")["function"] | {"type": "function"}]
    conversation: Any = [{"role": "user", "content": "Weather?"}]
    with sdk.responses.stream(model=MODEL, input=conversation, tools=tools) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds.count("response.output_item.done") == 4
    assert "response.reasoning_text.delta" in kinds
    assert final.output_text == "Let me see."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [json.loads(ARGUMENTS)] * 2
    conversation += final.output
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."} for call in calls]
    says(thinking_server, "It is sunny.")
    assert sdk.responses.create(model=MODEL, input=conversation, tools=tools).output_text == "It is sunny."
    backend = thinking_server.backend
    prompt = backend.served.token_decoder.decode(backend.requests[0].prompt_token_ids)
    assert prompt.count(f"Sun.{calls[0].call_id}") == 1
    assert "<think>Hm.</think>Let me see.<tool_call>" in prompt
    dumped: Any = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in final.output)]
    dumped += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."} for call in calls]
    sdk.responses.create(model=MODEL, input=dumped, tools=tools)
    assert backend.requests[1].prompt_token_ids == backend.requests[0].prompt_token_ids


def test_the_sdk_parses(sdk: openai.OpenAI, thinking_server: LiveServer) -> None:
    says(thinking_server, '{"city": "Paris", "days": 2}')
    parsed = sdk.responses.parse(model=MODEL, input="hi", text_format=GetWeather)
    assert parsed.output_parsed == GetWeather(city="Paris", days=2)
    assert thinking_server.backend.requests[0].grammar is not None
    with sdk.responses.stream(model=MODEL, input="hi", text_format=GetWeather) as events:
        assert events.get_final_response().output_parsed == GetWeather(city="Paris", days=2)
