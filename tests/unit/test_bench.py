"""`quire bench`: the arithmetic of its numbers, the reading of streams, and a run against a small server."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from quire.cluster.bench import Endpoint
from quire.cluster.bench import serve as bench
from quire.cluster.bench.chart import bar, show_chart
from quire.cluster.bench.client import BenchError, SseReader, _read_stream
from quire.cluster.bench.latency import Distribution, RequestTiming, summarize
from quire.cluster.bench.report import show_levels
from quire.cluster.bench.slo import Objective, num_good
from quire.cluster.bench.workload import Lengths, Question, questions, random_token_prompts, random_word_prompts
from quire.cluster.cli_http import base_url_of, error_message


def test_summary_is_exact() -> None:
    timings = [
        RequestTiming(10.0, 12.0, (11.0, 11.5, 12.0), num_prompt_tokens=5, num_output_tokens=3),
        RequestTiming(10.5, 14.0, (11.0, 14.0), num_prompt_tokens=7, num_output_tokens=2),
        RequestTiming(10.0, 11.0, error="HTTP 500: no"),
    ]
    summary = summarize(timings, concurrency=2, client_cpu_s=1.0)
    assert (summary.num_requests, summary.num_failed, summary.duration_s) == (3, 1, 4.0)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (12, 5)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 1.25, 4.25)
    assert summary.ttft_ms == Distribution(mean=750.0, p50=750.0, p90=950.0, p99=995.0)
    assert (summary.itl_ms.mean, summary.itl_ms.p50) == (pytest.approx(4000 / 3), 500.0)
    assert (summary.tpot_ms.mean, summary.tpot_ms.p50) == (1750.0, 1750.0)
    assert (summary.e2e_ms.mean, summary.client_cpu_share) == (2750.0, 0.25)


def test_goodput_counts_requests_that_keep_every_objective() -> None:
    timings = [
        RequestTiming(0.0, 1.2, (0.5, 0.9, 1.1), num_output_tokens=4),  # TTFT 500 ms, 200 ms per token
        RequestTiming(0.0, 1.2, (0.6, 1.1), num_output_tokens=3),  # TTFT 600 ms
        RequestTiming(0.0, 1.5, (0.4, 1.4), num_output_tokens=3),  # 500 ms per token
        RequestTiming(0.0, 0.3, (0.3,), num_output_tokens=1),  # no second token: nothing to wait for
        RequestTiming(0.0, 0.1, (0.1,), error="in the stream: no"),
        RequestTiming(0.0, 0.1),  # not a single token
    ]
    assert num_good(timings, [Objective.parse("ttft:500")]) == 3
    assert num_good(timings, [Objective.parse("ttft:500"), Objective.parse("tpot:200.1")]) == 2
    assert num_good(timings, [Objective.parse("e2e:1200")]) == 3
    summary = summarize(timings, None, rate=2.0, num_good=3)
    assert (summary.level, summary.good_requests_per_s) == ("2/s", 2.0)
    assert summary.tpot_ms.p50 == pytest.approx(250.0)  # of the first three: the others have nothing to wait for
    assert (summarize(timings, 4).level, summarize(timings, 4).good_requests_per_s) == ("4", None)


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "itl:5", "tpot:x", ""])
def test_objectives_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Objective.parse(text)


def test_lengths() -> None:
    assert (Lengths.parse("128"), Lengths.parse("16:64")) == (Lengths(128, 128), Lengths(16, 64))
    assert (str(Lengths(128, 128)), str(Lengths(16, 64))) == ("128", "16 to 64")
    for text in ("0", "64:16", "a", "", "1:2:3"):
        with pytest.raises(ValueError, match=r".*"):
            Lengths.parse(text)


def test_questions_share_a_prefix_and_nothing_else() -> None:
    def asked(seed: int, endpoint: Endpoint = "completions") -> list[Question]:
        return questions(endpoint, 50, 20, Lengths(3, 6), Lengths(7, 9), vocab_size=5000, seed=seed)

    prompts = [question.prompt for question in asked(1)]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} == {23, 24, 25, 26}
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 50
    assert {question.output_len for question in asked(1)} == {7, 8, 9}
    assert asked(1) == asked(1)
    assert prompts[0][:20] != asked(2)[0].prompt[:20]
    words = [str(question.prompt).split() for question in asked(1, "chat")]
    assert len({tuple(each[:20]) for each in words}) == 1
    assert {len(each) for each in words} == {23, 24, 25, 26}


def test_bars_are_in_proportion() -> None:
    assert [bar(value, 8.0, width=8) for value in (8.0, 4.0, 1.5, 0.0)] == ["█" * 8, "█" * 4, "█▌", ""]
    assert bar(0.0, 0.0) == ""


def test_chart_has_a_bar_per_level_and_measure() -> None:
    fast, slow = (
        summarize([RequestTiming(0.0, 10.0, (1.0, 1.0 + ms), num_output_tokens=tokens)], streams)
        for streams, tokens, ms in ((1, 100, 0.01), (8, 50, 0.02))
    )
    console = Console(width=100, file=io.StringIO(), color_system=None)
    show_chart(console, [fast, slow])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].split() == ["output", "tokens/s", "1", "10.0", "█" * 40]
    assert lines[1].split() == ["8", "5.0", "█" * 20]
    assert lines[6].split()[:5] == ["ITL", "p50,", "ms", "1", "10.0"]


def test_summary_of_failures_only() -> None:
    summary = summarize([RequestTiming(0.0, 2.0, error="no")], concurrency=1)
    assert (summary.num_failed, summary.output_tokens_per_s, summary.ttft_ms) == (1, 0.0, Distribution())


@pytest.mark.parametrize("separator", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 1000])
def test_sse_reader_does_not_depend_on_chunks(separator: bytes, chunk_size: int) -> None:
    stream = (
        b'id: 7\ndata: {"a": 1}' + separator + b": a comment" + separator + b"data: [DONE]" + separator + b"data: cut"
    )
    reader = SseReader()
    events = []
    for start in range(0, len(stream), chunk_size):
        events += reader.feed(stream[start : start + chunk_size])
    assert events == [b'{"a": 1}', b"[DONE]"]


def test_prompts_have_exact_lengths_and_differ() -> None:
    prompts = random_token_prompts(3, 50, vocab_size=1000, seed=1)
    assert [len(p) for p in prompts] == [50, 50, 50]
    assert len({tuple(p) for p in prompts}) == 3
    assert all(256 <= token_id < 1000 for p in prompts for token_id in p)
    assert prompts == random_token_prompts(3, 50, vocab_size=1000, seed=1)
    assert max(max(p) for p in random_token_prompts(3, 50, vocab_size=8, seed=1)) < 8
    assert [len(text.split()) for text in random_word_prompts(2, 30, seed=1)] == [30, 30]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://h/", "http://h/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://h/prefix", "http://h/prefix/v1"),
    ],
)
def test_base_url(given: str, used: str) -> None:
    assert base_url_of(given) == used


def test_error_message() -> None:
    assert error_message(400, b'{"error": {"message": "top_p:\\n too big"}}') == "HTTP 400: top_p: too big"
    assert error_message(502, b"<html>bad</html>") == "HTTP 502: <html>bad</html>"


async def read(*choices: dict[str, Any]) -> RequestTiming:
    """The timing of a stream with one event for each."""
    stream = asyncio.StreamReader()
    for choice in choices:
        stream.feed_data(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    stream.feed_data(b"data: [DONE]\n\n")
    stream.feed_eof()
    return await _read_stream(Chunks(stream), 0.0)  # type: ignore[arg-type]  # all that it takes of one of aiohttp's


class Chunks:
    """A stream as aiohttp hands it out."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def iter_any(self) -> AsyncIterator[bytes]:
        while chunk := await self._stream.read(64):
            yield chunk


async def test_every_event_with_a_token_counts() -> None:
    """As in vLLM's own benchmark: the text of a token may come with a later one."""
    role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    end = {"delta": {}, "finish_reason": "stop"}
    deltas = [{"reasoning": "a"}, {"reasoning_content": "b"}, {"content": ""}, {"content": "c"}]
    told = await read(role, *({"delta": delta, "finish_reason": None} for delta in deltas), end)
    assert (len(told.token_times_s), told.error) == (4, None)
    texts = [("", None), ("a", None), ("b", "length")]
    told = await read(*({"text": text, "finish_reason": reason} for text, reason in texts))
    assert (len(told.token_times_s), told.error) == (3, None)


async def test_an_answer_without_a_token_is_an_error() -> None:
    told = await read({"delta": {"role": "assistant", "content": ""}}, {"delta": {}, "finish_reason": "stop"})
    assert (told.token_times_s, told.error) == ((), "no token in the stream")


def test_what_was_not_measured_is_not_shown_as_nothing() -> None:
    """One token each: there is nothing between two of them."""
    console = Console(width=100, file=io.StringIO(), color_system=None)
    show_levels(console, [summarize([RequestTiming(0.0, 1.0, (0.5,), 10, 1)], concurrency=1)])
    assert isinstance(console.file, io.StringIO)
    rows = {line.split()[0]: line.split()[-1] for line in console.file.getvalue().splitlines()}
    assert (rows["TTFT"], rows["ITL"], rows["TPOT"]) == ("500", "-", "-")


class FakeServer:
    """Streams `max_tokens` pieces of text. Knows how many requests it ever had at once."""

    def __init__(self, *, takes_ignore_eos: bool = True, fail: bool = False) -> None:
        self.takes_ignore_eos = takes_ignore_eos
        self.fail = fail
        self.closes: Callable[[web.Request], bool] = lambda request: False  # instead of an answer
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.most_open = 0
        self.url = ""
        self.listed: object = {"data": [{"id": "tiny"}]}
        self.version: object = None

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(self.listed)

    async def tell_version(self, request: web.Request) -> web.Response:
        return web.json_response(self.version, status=404 if self.version is None else 200)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.closes(request):
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return web.json_response({"error": {"message": "ignore_eos: unknown field"}}, status=400)
        self.bodies.append(body)
        if self.fail and len(self.bodies) > 1:
            return web.json_response({"error": {"message": "queue is full"}}, status=503)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in ["", *["x"] * body["max_tokens"], ""]:
            choice = {"text": text} if "prompt" in body else {"delta": {"content": text}}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {
            "prompt_tokens": len(body["prompt"]) if "prompt" in body else 9,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self.open -= 1
        return response


async def start(server: FakeServer) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/version", server.tell_version)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    runner = await start(fake)
    yield fake
    await runner.cleanup()


def load(server: FakeServer, **changes: Any) -> bench.Load:
    settings: dict[str, Any] = {
        "url": server.url,
        "model": None,
        "endpoint": "completions",
        "concurrency": (1, 3),
        "num_requests": 6,
        "rates": (),
        "prefix_len": 0,
        "input_len": Lengths(11, 11),
        "output_len": Lengths(4, 4),
        "temperature": 0.0,
        "vocab_size": 1000,
        "seed": 0,
        "api_key": None,
        "timeout_s": 10.0,
    }
    return bench.Load(**{**settings, **changes})


async def run(load: bench.Load) -> tuple[bench.Result, list[str]]:
    seen: list[str] = []
    result = await bench.run(
        load, lambda level: seen.append(f"{level.title}, {level.num_requests}"), lambda: seen.append(".")
    )
    return result, seen


async def test_levels_lengths_and_progress(server: FakeServer) -> None:
    result, seen = await run(load(server))
    assert (result.model, result.exact_output_len, result.errors, result.server_version) == ("tiny", True, [], None)
    assert seen == ["1 streams, 6", *"......", "3 streams, 6", *"......"]
    assert [(s.num_failed, s.num_prompt_tokens, s.num_output_tokens) for s in result.levels] == [(0, 66, 24)] * 2
    assert server.most_open <= 3
    assert len(server.bodies) == 13  # one to warm up
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 13
    assert all(body["max_tokens"] == 4 and body["ignore_eos"] and body["stream"] for body in server.bodies)


async def test_arrivals_at_a_rate(server: FakeServer) -> None:
    settings = {"rates": (500.0, 1000.0), "prefix_len": 5, "objectives": (Objective("ttft", 60_000.0),)}
    result, seen = await run(load(server, **settings))
    assert seen == ["500 requests/s, 6", *"......", "1000 requests/s, 6", *"......"]
    assert [(s.level, s.num_failed, s.num_prompt_tokens, s.num_cached_tokens) for s in result.levels] == [
        ("500/s", 0, 96, 12),
        ("1000/s", 0, 96, 12),
    ]
    assert all(s.good_requests_per_s == s.requests_per_s for s in result.levels)
    assert len({tuple(body["prompt"][:5]) for body in server.bodies[1:7]}) == 1


def test_a_level_takes_its_time_unless_told_otherwise() -> None:
    nobody = FakeServer()
    assert [level.num_requests for level in load(nobody, num_requests=None).levels] == [8, 24]
    rates = load(nobody, num_requests=None, rates=(0.1, 2.0)).levels
    assert [(level.rate, level.num_requests) for level in rates] == [(0.1, 8), (2.0, 60)]


@pytest.mark.parametrize("listed", [[], {}, {"data": None}, {"data": ["tiny"]}, 7])
async def test_a_strange_server(listed: object, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer()
    monkeypatch.setattr(fake, "listed", listed)
    runner = await start(fake)
    with pytest.raises(BenchError, match="/v1/models does not answer as an OpenAI-compatible server's does"):
        await run(load(fake))
    await runner.cleanup()


async def test_a_version_of_another_kind(server: FakeServer) -> None:
    server.version = ["1.0"]
    result, _ = await run(load(server, concurrency=(1,)))
    assert result.server_version is None


async def test_chat_endpoint(server: FakeServer) -> None:
    result, _ = await run(load(server, endpoint="chat", concurrency=(2,)))
    assert result.levels[0].num_output_tokens == 24
    assert server.bodies[0]["messages"][0]["role"] == "user"


async def test_a_server_that_does_not_take_ignore_eos(server: FakeServer) -> None:
    server.takes_ignore_eos = False
    result, _ = await run(load(server, concurrency=(1,)))
    assert not result.exact_output_len
    assert result.levels[0].num_failed == 0
    assert "ignore_eos" not in server.bodies[0]


async def test_failures_are_counted_and_told(server: FakeServer) -> None:
    server.fail = True
    result, _ = await run(load(server, concurrency=(2,)))
    assert result.levels[0].num_failed == 6
    assert result.errors == ["HTTP 503: queue is full"]


async def test_a_request_that_meets_a_closed_connection_is_sent_again(server: FakeServer) -> None:
    used = set[asyncio.BaseTransport | None]()

    def was_used(request: web.Request) -> bool:
        is_kept = request.transport in used
        used.add(request.transport)
        return is_kept

    server.closes = was_used
    result, _ = await run(load(server, concurrency=(1, 3)))
    assert ([level.num_failed for level in result.levels], result.errors) == ([0, 0], [])
    assert len(server.bodies) == 13  # each answered once
    assert result.levels[0].num_sent_again > 0


async def test_a_server_that_had_time_to_work_on_a_request_is_not_asked_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cluster.bench.client.CLOSED_S", 0.0)
    used = set[asyncio.BaseTransport | None]()
    server.closes = lambda request: request.transport in used or bool(used.add(request.transport))
    result, _ = await run(load(server, concurrency=(1,)))
    assert (result.levels[0].num_failed, result.levels[0].num_sent_again) == (3, 0)  # every other one


def test_requests_that_failed_or_were_sent_again_are_shown() -> None:
    timings = [
        RequestTiming(0.0, 1.0, (0.5, 1.0), 10, 2, num_repeats=2),
        RequestTiming(0.0, 1.0, error="gone"),
        RequestTiming(0.0, 1.0, (0.5, 1.0), 10, 2),
    ]
    out = io.StringIO()
    show_levels(Console(file=out, width=100), [summarize(timings[first:], 1) for first in (0, 1, 2)])
    assert [cell.strip() for cell in re.split(r"  +", out.getvalue().splitlines()[1].strip())] == [
        "requests",
        "3 (1 failed, 1 sent again)",
        "2 (1 failed)",
        "1",
    ]


async def test_a_redirect_to_nowhere_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    answer = server.answer

    async def redirect(request: web.Request) -> web.StreamResponse:
        if server.bodies:
            raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")
        return await answer(request)

    monkeypatch.setattr(server, "answer", redirect)
    runner = await start(server)
    result, _ = await run(load(server, concurrency=(1,)))
    await runner.cleanup()
    assert (result.levels[0].num_failed, result.levels[0].num_sent_again) == (6, 0)
    assert "Cannot connect" in result.errors[0]


async def test_a_connection_that_is_closed_before_any_answer_is_a_failure(server: FakeServer) -> None:
    server.closes = lambda request: len(server.bodies) > 0
    result, _ = await run(load(server, concurrency=(1,)))
    assert result.levels[0].num_failed == 6
    assert result.errors == ["ServerDisconnectedError: Server disconnected"]


async def test_no_server() -> None:
    with pytest.raises(BenchError, match=r"No server answers at 127\.0\.0\.1:1\."):
        await run(load(FakeServer(), url="127.0.0.1:1"))
