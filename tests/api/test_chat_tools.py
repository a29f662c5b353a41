"""Tool calls through the API, whole and streamed, on a backend that answers token by token what it is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.engine.config import GrammarConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
ARGUMENTS = '{"city": "São Paulo 🎉", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def model(**config: Any) -> ServedModel:
    info = load_model_info(ModelConfig(max_model_len=1024))
    return ServedModel.create(info, load_tokenizer(info), config=ModelConfig(**config))


@pytest.fixture(scope="module")
def with_tools() -> ServedModel:
    return model(chat_template="hermes")


@pytest.fixture
def backend(with_tools: ServedModel) -> FakeBackend:
    return FakeBackend(with_tools)


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


def answer(backend: FakeBackend, text: str) -> None:
    backend.answer_ids = backend.served.input_processor.tokenize(text, add_special_tokens=False)


def prompt_of(backend: FakeBackend) -> str:
    return backend.served.token_decoder.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, **fields: Any) -> tuple[str, str]:
    """The field at fault and the message, the same with and without a stream."""
    found = []
    for streamed in (False, True):
        response = await client.post("/v1/chat/completions", json={**BODY, **fields, "stream": streamed})
        assert response.status_code == 400, response.text
        found.append((response.json()["error"]["param"], response.json()["error"]["message"]))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("grammar", ["root ::= (", "root ::= missing ]", 'root ::= "a', "root ::= " + "(" * 50_000])
async def test_a_grammar_that_cannot_be_read_is_refused(client: httpx.AsyncClient, grammar: str) -> None:
    param, message = await refusal(client, structured_outputs={"grammar": grammar})
    assert param == "structured_outputs.grammar"
    assert message.startswith("structured_outputs.grammar: the grammar cannot be read: ")
    assert len(message) < 400


async def test_schemas_are_held_to_the_limits_of_the_model(
    client: httpx.AsyncClient, backend: FakeBackend, with_tools: ServedModel
) -> None:
    backend.served = replace(with_tools, grammar_limits=GrammarConfig(max_source_bytes=50))
    assert await refusal(client, structured_outputs={"regex": "a" * 51}) == (
        "structured_outputs.regex",
        "structured_outputs.regex: the regex has 51 bytes, at most 50 are allowed.",
    )
    param, message = await refusal(client, tool_choice="required")
    assert (param, message[:50]) == (
        "tools[0].function.parameters",
        "tools[0].function.parameters: the JSON schemas of ",
    )


async def chunks_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    body = {**BODY, **fields, "stream": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    *events, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def reassembled(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message and finish reason of choice 0, put together as the official SDK does."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    finish_reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"]:
                continue
            finish_reason = choice["finish_reason"] or finish_reason
            delta = choice["delta"]
            if "role" in delta:
                message["role"] = delta["role"]
            for key in ("content", "reasoning_content"):
                if delta.get(key) is not None:
                    message[key] = (message.get(key) or "") + delta[key]
            for piece in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert piece["id"].startswith("call_")
                    calls.append({"type": piece["type"], "function": {**piece["function"]}})
                else:
                    assert piece.keys() == {"index", "function"}
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message, finish_reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", []):
        assert len(call.pop("id")) == 29
    return message


TEXTS = [
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    f"{CALL}\nThat is it.",
    "No call at all: 你好 🎉.",
    "<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
    '<tool_call>{"name": "get_weather", "argum',
    "<tool_call>",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("tokens_per_step", "repeat"), [(1, False), (1, True), (7, False)])
async def test_a_stream_joins_to_the_whole_answer(
    client: httpx.AsyncClient, backend: FakeBackend, text: str, tokens_per_step: int, repeat: bool
) -> None:
    """Also where tokens arrive twice, as after a change of engines."""
    backend.tokens_per_step, backend.repeat = tokens_per_step, repeat
    answer(backend, text)
    whole = await post(client)
    [choice] = whole["choices"]
    message, finish_reason = reassembled(await chunks_of(client))
    assert message == without_ids(choice["message"])
    assert finish_reason == choice["finish_reason"]


async def test_calls(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, f"{CALL}\n{CALL}")
    [choice] = (await post(client))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert (
        without_ids(choice["message"])["tool_calls"]
        == [{"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}] * 2
    )


async def test_a_call_that_the_length_cut_short(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, CALL)
    [choice] = (await post(client, max_tokens=24))["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"]


async def test_arguments_stream_while_they_are_written(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, CALL)
    chunks = await chunks_of(client)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    calls = [delta["tool_calls"][0] for delta in deltas[1:] if delta]
    assert calls[0]["function"]["name"] == "get_weather"
    assert len(calls) > 5
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_several_choices_each_have_calls_of_their_own(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, CALL)  # choice 1 begins at its second token
    choices = (await post(client, n=2))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]
    assert choices[1]["message"]["content"].endswith("</tool_call>")


async def test_logprobs_and_token_ids_hold_every_token(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, CALL)
    fields = {"logprobs": True, "return_token_ids": True}
    [choice] = (await post(client, **fields))["choices"]
    chunks = [chunk["choices"][0] for chunk in await chunks_of(client, **fields)]
    assert [i for chunk in chunks for i in chunk.get("token_ids", [])] == choice["token_ids"]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]


async def test_an_answer_of_nothing_may_be_sent_back(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.answer_ids = []
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    prompts = []
    for message in (choice["message"], {**choice["message"], "tool_calls": []}, {"role": "assistant", "content": ""}):
        messages = [*body["messages"], message, {"role": "user", "content": "and?"}]
        response = await client.post("/v1/chat/completions", json={**body, "messages": messages})
        assert response.status_code == 200, response.text
        prompts.append(backend.requests[-1].prompt_token_ids)
    assert prompts[0] == prompts[1] == prompts[2]
    for role in ("user", "system", "tool"):
        response = await client.post(
            "/v1/chat/completions", json={**body, "messages": [{"role": role, "content": None}]}
        )
        assert response.json()["error"]["message"] == "messages[0].content: is required."


async def test_without_tools_or_with_none_all_is_content(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, CALL)
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tools": None, "tool_choice": "none"}):
        [choice] = (await post(client, **fields))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "get_weather" not in prompt_of(backend)


async def test_the_prompt_has_tools_calls_and_results(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, CALL)
    called = (await post(client))["choices"][0]["message"]
    assert '{"type": "function", "function": {"name": "get_weather", "description": "The weather' in prompt_of(backend)
    result = {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "Sun"}],
    }
    answer(backend, "Sunny.")
    messages = [{"role": "system", "content": "Be brief."}, *BODY["messages"], called, result]
    assert (await post(client, messages=messages))["choices"][0]["message"]["content"] == "Sunny."
    prompt = prompt_of(backend)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions")
    assert prompt.endswith(
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nSun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_stop_strings_work_in_what_users_see(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, f"One, two.\n{CALL}")
    [choice] = (await post(client, stop=["two"]))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "One, ", "refusal": None}
    [choice] = (await post(client, stop=["Paulo"], include_stop_str_in_output=True))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "São Paulo'
    assert choice["stop_reason"] == "Paulo"


A_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_a_choice_that_must_be_made_is_a_grammar(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """The engines hold answers to it; what it allows is tested with the grammars."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    held: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": named},
        {"parallel_tool_calls": False},
        {"tools": [strict]},
    ]
    answer(backend, CALL)
    for fields in held:
        [choice] = (await post(client, **fields))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        found = backend.requests[-1].grammar
        assert found is not None
        assert (found.kind, found.param) == ("lark", "tools")
        assert "get_weather" in found.source
    await post(client)
    assert backend.requests[-1].grammar is None


CALLED = {"role": "assistant", "tool_calls": [A_CALL]}


def with_call(**changes: Any) -> list[dict[str, Any]]:
    return [*BODY["messages"], {"role": "assistant", "tool_calls": [{**A_CALL, **changes}]}]


def with_arguments(arguments: object) -> list[dict[str, Any]]:
    return with_call(function={"name": "f", "arguments": arguments})


@pytest.mark.parametrize("arguments", ["{oops", "[1]", '"1234"', "NaN", '{"a": 1e400}', "\\ud800"])
async def test_what_a_model_wrote_is_sent_back_to_it(
    client: httpx.AsyncClient, backend: FakeBackend, arguments: str
) -> None:
    """An agent that tells a model of its mistake shows it the mistake."""
    told = {"role": "tool", "tool_call_id": "c1", "content": "no JSON object"}
    await post(client, messages=[*with_arguments(arguments), told])
    assert f'"arguments": {arguments}}}' in prompt_of(backend)


async def test_a_template_that_walks_arguments_names_those_that_it_cannot_walk(client: httpx.AsyncClient) -> None:
    walks = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ k }}"
    )
    template = walks + "{% endfor %}{% endfor %}{{ m.content }}{% endfor %}{{ tools | tojson }}"
    param, message = await refusal(client, messages=with_arguments("{oops"), chat_template=template)
    assert param == "messages[1].tool_calls[0].function.arguments"
    assert (
        message == f"{param}: must be a string that holds a JSON object, as the chat template of this model reads it."
    )


A_STRING = "must be a string that holds a JSON object"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": with_arguments({"a": 1})}, "messages[1].tool_calls[0].function.arguments", A_STRING),
    ({"messages": with_call(id=5)}, "messages[1].tool_calls[0].id", "must be a string"),
    ({"messages": with_call(id="")}, "messages[1].tool_calls[0].id", "must have 1 to 256 characters"),
    ({"messages": with_call(type="custom")}, "messages[1].tool_calls[0].type", "must be 'function'"),
    ({"messages": with_call(nam="x")}, "messages[1].tool_calls[0].nam", "is not a known field"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "is required with role 'tool'",
    ),
    (
        {"messages": [CALLED, {"role": "tool", "content": "x", "tool_call_id": "c2"}]},
        "messages[1].tool_call_id",
        "must be the id of a call of an earlier message, got 'c2' (known: c1)",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [A_CALL]}]},
        "messages[0].tool_calls",
        "is allowed only with role 'assistant', got 'user'",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "reasoning": "y"}]},
        "messages[0].reasoning",
        "is allowed only with role 'assistant', got 'user'",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "c1"}]},
        "messages[0].tool_call_id",
        "is allowed only with role 'tool', got 'user'",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "is required"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "must be 'function', got 'custom'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "must have 1 to 64"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "'get_weather' was given before"),
    ({"tools": [TOOL] * 129}, "tools", "must hold at most 128 entries, got 129"),
    ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required' or"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "of type 'allowed_tools' is not supported"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "there is no tool 'g' in tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "'required' is allowed only with tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
async def test_mistakes_name_their_field(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], param: str, message: str
) -> None:
    found, said = await refusal(client, **fields)
    assert found == param
    assert said.startswith(f"{param}: {message}")
    assert backend.requests == []


async def test_a_template_without_tools_is_said_to_be_one(served: ServedModel) -> None:
    transport = httpx.ASGITransport(create_app(FakeBackend(served)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        assert await refusal(client) == (
            "tools",
            "tools: the chat template of this model does not know tools; a service can be given one that does, by its "
            "setting chat_template (`hermes` comes with Quire).",
        )
        param, message = await refusal(client, tools=None, messages=[*BODY["messages"], CALLED])
        assert (param, message) == (
            "messages[1].tool_calls",
            "messages[1].tool_calls: the chat template of this model does not show calls.",
        )


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{{ c.id }}:{{ c.function | tojson }}{% endfor %}{% elif m.role == 'tool' %}[{{ m.tool_call_id }}]{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.fixture
async def mistral(tmp_path: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeBackend]]:
    """A model whose marks are special tokens."""
    path = tmp_path / "template.jinja"
    path.write_text(MISTRAL)
    info = load_model_info(ModelConfig(max_model_len=1024))
    tokenizer = load_tokenizer(info)
    info = replace(info, vocab_size=info.vocab_size + 3)
    tokenizer.backend_tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    served = ServedModel.create(info, tokenizer, config=ModelConfig(chat_template=str(path)))
    fake = FakeBackend(served)
    transport = httpx.ASGITransport(create_app(fake), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http, fake


async def test_marks_that_are_special_tokens(mistral: tuple[httpx.AsyncClient, FakeBackend]) -> None:
    client, backend = mistral
    answer(backend, f"Yes[OTHER].[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}")
    for fields in ({}, {"stop": ["[TOOL", "LS]get"]}):  # what users do not see is no part of a stop string
        [choice] = (await post(client, **fields))["choices"]
        assert choice["message"]["content"] == "Yes."
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        message, _ = reassembled(await chunks_of(client, **fields))
        assert message == without_ids(choice["message"])
    answer(backend, "[TOOL_CALLS] or not")
    assert (await post(client))["choices"][0]["message"]["content"] == " or not"
    shown = (await post(client, skip_special_tokens=False))["choices"][0]["message"]["content"]
    assert shown == "[TOOL_CALLS] or not"


async def test_mistrals_templates_get_ids_that_they_accept(mistral: tuple[httpx.AsyncClient, FakeBackend]) -> None:
    client, backend = mistral
    answer(backend, f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}")
    called = (await post(client))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "Sun"}
    await post(client, messages=[*BODY["messages"], called, result])
    prompt = prompt_of(backend)
    short = prompt.split("[TOOL_CALLS]")[1].split(":")[0]
    assert len(short) == 9
    assert short.isalnum()
    assert f"[{short}]Sun" in prompt
