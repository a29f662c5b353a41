"""What decides the prompt of a chat: templates of the model, of the service and of the request, and their fields."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend
from tokenizers import processors

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.chat_template import Conversation
from quire.cluster.api.errors import status_of
from quire.cluster.api.limits import ApiLimits
from quire.cluster.api.template_env import compile_template
from quire.cluster.api.template_sandbox import MAX_WAITING, TemplateSandbox
from quire.engine.config import ModelConfig
from quire.engine.errors import ConfigError, InvalidRequestError, OverloadedError
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"


def prompt_of(backend: FakeBackend) -> str:
    return backend.served.token_decoder.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def prompt(client: httpx.AsyncClient, backend: FakeBackend, **fields: Any) -> str:
    response = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER], **fields})
    assert response.status_code == 200, response.text
    return prompt_of(backend)


async def refusal(client: httpx.AsyncClient, **fields: Any) -> tuple[str, str]:
    body = {"model": MODEL, "messages": [USER], **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    again = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER]})
    assert again.status_code == 200
    return response.json()["error"]["param"], response.json()["error"]["message"]


async def test_a_template_of_the_request(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert await prompt(client, backend, chat_template=PLAIN) == "user=hi;"
    template = "{{ bos_token }}{% if add_generation_prompt %}A{% endif %}{{ color }}{{ reasoning_effort }}"
    fields: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"color": "red"}}
    assert await prompt(client, backend, **fields, reasoning_effort="low") == "<|im_start|>Aredlow"
    assert await prompt(client, backend, **fields, add_generation_prompt=False) == "<|im_start|>red"
    documents = "{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ documents | tojson }}"
    given = [{"title": "T", "text": "é"}]
    assert await prompt(client, backend, chat_template=documents, documents=given) == (
        'T: é\n[{"title": "T", "text": "é"}]'
    )


async def test_what_transformers_gives_templates(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    template = (
        "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% if loop.first %}{% break %}"
        "{% endif %}\n{% endfor %}{{ [1, '<&>'] | tojson(indent=1) }}{{ strftime_now('%Y') | length }}"
    )
    assert await prompt(client, backend, chat_template=template) == 'hi[\n 1,\n "<&>"\n]4'


CONTENT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}[{{ p['text'] }}]{% endfor %}{% endif %}"
    "{% endmacro %}{% for m in messages %}{% set content = m['content'] %}{{ show(content) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PLAIN, CONTENT, "user=a\nb;"),
        (PARTS, CONTENT, "[a][b]"),
        (PARTS, "hi", "[hi]"),
        (EITHER, CONTENT, "[a][b]"),
        (EITHER, "hi", "hi"),
    ],
)
async def test_content_comes_as_the_template_reads_it(
    client: httpx.AsyncClient, backend: FakeBackend, template: str, content: Any, text: str
) -> None:
    messages = [{"role": "user", "content": content}]
    assert await prompt(client, backend, chat_template=template, messages=messages) == text


@pytest.mark.parametrize(
    ("source", "content_format", "takes_strings"),
    [
        (PLAIN, "string", False),
        (
            "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{{ m['content'] | trim }}{% endfor %}",
            "string",
            False,
        ),
        (
            "{% for m in messages %}{% for c in m['content'] | selectattr('type') %}{% endfor %}{% endfor %}",
            "parts",
            False,
        ),
        ("{% if m.content is string %}{% else %}{% for c in m.content %}{% endfor %}{% endif %}", "parts", True),
        (EITHER, "parts", True),
    ],
)
def test_the_syntax_tree_tells_the_format(source: str, content_format: str, takes_strings: bool) -> None:
    compiled = compile_template(source)
    assert (compiled.content_format, compiled.takes_strings) == (content_format, takes_strings)


ASSISTANT = {"role": "assistant", "content": "The answer is"}


async def test_a_final_message_goes_on(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    messages = [USER, ASSISTANT]
    text = await prompt(client, backend, messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "The"}, {"type": "text", "text": "answer"}]}
    text = await prompt(client, backend, messages=[USER, parts], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe\nanswer")
    text = await prompt(client, backend, messages=messages, add_generation_prompt=False)
    assert text.endswith("The answer is<|im_end|>\n")
    shouted = {"chat_template": "{{ messages[1].content | upper }}END", "messages": messages}
    assert await prompt(client, backend, **shouted, continue_final_message=True) == "THE ANSWER IS"
    body = {"model": MODEL, "messages": messages, "continue_final_message": True, "echo": True}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    assert whole["choices"][0]["message"]["content"] == "The answer is" + DEFAULT_ANSWER
    streamed = (await client.post("/v1/chat/completions", json={**body, "stream": True})).text
    assert '"delta":{"content":"The answer is The"' in streamed


async def test_special_tokens_where_they_are_asked_for() -> None:
    """Of a tokenizer that begins texts with one."""
    info = load_model_info(ModelConfig(max_model_len=1024))
    tokenizer = load_tokenizer(info)
    begin = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    backend = FakeBackend(ServedModel.create(info, tokenizer))
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        assert await prompt(client, backend, chat_template=PLAIN) == "user=hi;"
        assert await prompt(client, backend, chat_template=PLAIN, add_special_tokens=True) == "<|endoftext|>user=hi;"
        for fields, text in (({}, "<|endoftext|>a"), ({"add_special_tokens": False}, "a")):
            await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1, **fields})
            assert prompt_of(backend) == text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"documents": [{"text": "x"}]}, "documents", "documents: the chat template of this model does not take it."),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort: the chat template of this model does not"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "reasoning_effort: must be 'none', 'minimal', 'low',"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
            "chat_template_kwargs.enable_thinking: the chat template does not read it.",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "chat_template_kwargs.messages: must be given as a field of its own, or not at all.",
        ),
        (
            {"continue_final_message": True},
            "continue_final_message",
            "continue_final_message: needs a final message of role 'assistant' with content.",
        ),
        ({"echo": True}, "echo", "echo: needs a final message of role 'assistant' with content."),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": [ASSISTANT]},
            "continue_final_message",
            "continue_final_message: is not allowed together with add_generation_prompt.",
        ),
        (
            {"continue_final_message": True, "messages": [ASSISTANT], "chat_template": "{{ messages[0].content[:3] }}"},
            "continue_final_message",
            "continue_final_message: the chat template does not show the final message's content as it is.",
        ),
        (
            {"chat_template": "{% if %}"},
            "chat_template",
            "chat_template: the chat template cannot be read: Expected an",
        ),
        (
            {"chat_template": "{{ raise_exception('no!') }}"},
            "chat_template",
            "chat_template: the chat template fails: no!",
        ),
        ({"chat_template": "{{ messages[7].x.y }}"}, "chat_template", "chat_template: the chat template fails:"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat_template", "chat_template: the chat template fails:"),
        ({"chat_template": "{{ messages.append(1) }}"}, "chat_template", "chat_template: the chat template fails:"),
        ({"chat_template": "x" * 150_000}, "chat_template", "chat_template: 150000 characters given, at most 131072"),
        ({"chat_template": ""}, "messages", "messages: must hold at least one token, got none."),
        ({"chat_template": 5}, "chat_template", "chat_template: must be a string, got 5."),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    found, said = await refusal(client, **fields)
    assert found == param
    assert said.startswith(message)


HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ '%09999999999d' % 1 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 2 ** (10 ** 10) }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "{{ lipsum(n=100000) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("template", HOSTILE)
async def test_a_hostile_template_harms_nobody(client: httpx.AsyncClient, template: str) -> None:
    """It is refused within its time, other requests go on meanwhile, and the next template is rendered."""
    begun = time.monotonic()
    task = asyncio.create_task(refusal(client, chat_template=template))
    await asyncio.sleep(0.05)
    other = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER]})
    assert other.status_code == 200
    param, message = await task
    assert param in ("chat_template", "messages")
    assert len(message) < 400
    assert time.monotonic() - begun < 30  # two seconds and the start of a process, on a busy machine
    body = {"model": MODEL, "messages": [USER], "chat_template": PLAIN}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("template", ['{{ "\\ud800" }}', "{{ raise_exception('\\ud800') }}"])
async def test_half_a_surrogate_pair_is_the_templates_mistake(template: str) -> None:
    """No tokenizer takes it, and no message can carry it; the process that has met it goes on."""
    sandbox = TemplateSandbox()
    chat = Conversation(messages=[USER], own_template=True)
    assert await sandbox.render(PLAIN, chat, 100) == "user=hi;"
    process = sandbox._process
    with pytest.raises(InvalidRequestError, match=r"chat_template: the chat template (makes \\ud800|fails: \?)"):
        await sandbox.render(template, chat, 100)
    assert await sandbox.render(PLAIN, chat, 100) == "user=hi;"
    assert sandbox._process is process
    sandbox.close()


async def test_a_client_that_leaves_does_not_mix_up_answers() -> None:
    sandbox = TemplateSandbox()
    chat = Conversation(messages=[USER], own_template=True)
    first = asyncio.create_task(sandbox.render("{% for i in range(99999) %}{% endfor %}first", chat, 100))
    await asyncio.sleep(0.02)
    first.cancel()
    assert await sandbox.render("second", chat, 100) == "second"
    assert await sandbox.render(PLAIN, chat, 100) == "user=hi;"
    sandbox.close()


async def test_few_templates_wait_and_none_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, rendered, may_end = TemplateSandbox(), [], threading.Event()
    chat = Conversation(messages=[USER], own_template=True)

    def render(order: Any) -> str:
        rendered.append(order.source)
        may_end.wait(10)
        return str(order.source)

    monkeypatch.setattr(sandbox, "_render", render)
    tasks = [asyncio.create_task(sandbox.render(str(i), chat, 100)) for i in range(1 + MAX_WAITING)]
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError) as caught:
        await sandbox.render("one more", chat, 100)
    assert (status_of(caught.value), caught.value.retry_after_s) == (503, 2.0)
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.sleep(0)
    last = asyncio.create_task(sandbox.render("last", chat, 100))
    may_end.set()
    assert await asyncio.gather(tasks[-1], last) == [str(MAX_WAITING), "last"]
    assert rendered == ["0", str(MAX_WAITING), "last"]


async def test_a_service_may_refuse_templates_of_requests(backend: FakeBackend) -> None:
    transport = httpx.ASGITransport(create_app(backend, limits=ApiLimits(request_templates=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        param, message = await refusal(http, chat_template="a")
        assert param == "chat_template"
        assert "api.request_templates" in message
        answer = await http.post("/tokenize", json={"messages": [USER], "chat_template": "a"})
        assert answer.status_code == 400


def model(**config: Any) -> ServedModel:
    info = load_model_info(ModelConfig(max_model_len=1024))
    return ServedModel.create(info, load_tokenizer(info), config=ModelConfig(**config))


@pytest.fixture
async def with_file(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, FakeBackend]]:
    (tmp_path / "mine.jinja").write_text(PLAIN)
    backend = FakeBackend(model(chat_template=str(tmp_path / "mine.jinja")))
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client, backend


async def test_a_template_from_a_file(with_file: tuple[httpx.AsyncClient, FakeBackend]) -> None:
    client, backend = with_file
    assert await prompt(client, backend) == "user=hi;"


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    for name in ("nothing", str(tmp_path), "../templates/hermes", str(tmp_path / "x.jinja")):
        with pytest.raises(
            ConfigError, match=r"neither a file that can be read nor one that comes with Quire \(hermes\)"
        ):
            model(chat_template=name)


def test_a_model_with_a_template_for_tools(served: ServedModel) -> None:
    from dataclasses import replace

    style = replace(served.chat, templates={"default": "a", "tool_use": "b"})
    assert (style.template_for(tools=False), style.template_for(tools=True)) == ("a", "b")
    assert replace(style, templates={"default": "a"}).template_for(tools=True) == "a"
    assert replace(style, templates={}).template_for(tools=True) is None
