"""Streams of every kind, and faults that strike while they run: what each costs, and that nothing is lost."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from cluster_processes import wait_for

from quire.cluster.service_http import Samples, Service

NUM_TOKENS = 300
NUM_PROMPT_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}],
    "tool_choice": "required",
}
_LOSS = re.compile(r"\w+ (\S+ \S+) (?:engine|gateway) .*(?:A step failed|was lost)")
TIMEOUT = httpx.Timeout(240)
LOGPROB_TOLERANCE = 1e-3  # keys and values that are computed again in one piece differ in the last bits of float32


@dataclass
class Stream:
    """One streamed answer: what it came to, and when its events came."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    calls: dict[int, str] = field(default_factory=dict)  # name and arguments of each tool call, by its index
    ends: dict[int, tuple[str, object]] = field(default_factory=dict)  # finish_reason, stop_reason
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # prompt and completion tokens
    is_done: bool = False
    error: str | None = None
    times: list[float] = field(default_factory=list)
    num_characters: int = 0

    def take(self, event: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        if "error" in event:
            self.error = event["error"]["message"]
        if event.get("usage"):
            self.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for choice in event.get("choices", []):
            index = choice["index"]
            delta = choice.get("delta", {})
            self._add(self.texts, index, choice.get("text") or delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                self._add(self.calls, call["index"], function.get("name", "") + function.get("arguments", ""))
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"] is not None:
                assert index not in self.ends, "a choice ends once"
                self.ends[index] = (choice["finish_reason"], choice.get("stop_reason"))

    def _add(self, texts: dict[int, str], index: int, text: str) -> None:
        texts[index] = texts.get(index, "") + text
        self.num_characters += len(text)

    def longest_pause(self, start: float, end: float) -> float:
        """Seconds of the longest wait for an event that began between two moments, or was under way at the first."""
        waits = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in waits if after > start and before < end), default=0.0)


def bodies(model: str, seed: int, stop: str | None = None) -> list[dict[str, Any]]:
    """Greedy, seeded, schema, regex, n = 2, logprobs, stop string: twelve in all, and a tool call."""
    draw = random.Random(seed)
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    seeded: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": seed + 1, "ignore_eos": True}
    constrained = {"temperature": 0.8, "seed": seed + 2}
    kinds = [
        greedy,
        greedy,
        seeded,
        {**seeded, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {**constrained, "structured_outputs": {"json": SCHEMA}},
        {**constrained, "structured_outputs": {"json": SCHEMA}, "seed": seed + 3},
        {**constrained, "structured_outputs": {"regex": "([a-f]{3}-){40}end"}},
        {**seeded, "n": 2},
        {**greedy, "n": 2},
        {**greedy, "logprobs": 3},
        {**seeded, "logprobs": 0},
        {**greedy, **({} if stop is None else {"stop": [stop]})},
    ]
    common = {"model": model, "max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    call = {**common, **constrained, "messages": [{"role": "user", "content": f"Size {seed}?"}], **TOOLS}
    prompts = [[draw.randrange(1, 199) for _ in range(NUM_PROMPT_TOKENS)] for _ in kinds]
    return [*({**common, "prompt": prompt, **kind} for prompt, kind in zip(prompts, kinds, strict=True)), call]


class Run:
    """All bodies at once."""

    def __init__(self, url: str, requests: list[dict[str, Any]]) -> None:
        self.streams = [Stream() for _ in requests]
        self._pool = ThreadPoolExecutor(len(requests))
        self._done = [
            self._pool.submit(self._read, url, body, stream)
            for body, stream in zip(requests, self.streams, strict=True)
        ]

    def wait(self) -> list[Stream]:
        for done in self._done:
            done.result(300)
        self._pool.shutdown()
        return self.streams

    @property
    def num_characters(self) -> int:
        """Of all streams so far. How many events they come in depends on how busy the machine is."""
        return sum(stream.num_characters for stream in self.streams)

    @property
    def is_over(self) -> bool:
        return all(done.done() for done in self._done)

    def _read(self, url: str, body: dict[str, Any], stream: Stream) -> None:
        path = "chat/completions" if "messages" in body else "completions"
        with httpx.stream("POST", f"{url}/v1/{path}", json=body, timeout=TIMEOUT) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code}: {response.read().decode()}"
                return
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    stream.is_done = True
                elif line.startswith("data: "):
                    stream.take(json.loads(line.removeprefix("data: ")))


class Embeddings:
    """Embeddings asked for again and again, one after the other, until `stop`; each is held against the first."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._body = url, {"model": model, "input": list(range(1, 180))}
        self._expected = self._ask()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._asking = self._pool.submit(self._run)
        self.num_answers = 0

    def stop(self) -> None:
        """Raises what was wrong with any of them."""
        self._stopping.set()
        self._asking.result(120)
        self._pool.shutdown()

    def _run(self) -> None:
        while not self._stopping.is_set():
            vector, usage = self._ask()
            assert usage == self._expected[1]
            assert max(abs(a - b) for a, b in zip(vector, self._expected[0], strict=True)) < LOGPROB_TOLERANCE
            self.num_answers += 1

    def _ask(self) -> tuple[list[float], dict[str, int]]:
        response = httpx.post(f"{self._url}/v1/embeddings", json=self._body, timeout=TIMEOUT)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["data"][0]["embedding"], answer["usage"]


@dataclass(frozen=True)
class FaultCost:
    """What one fault has cost."""

    fault: str
    detected_s: float  # until the engine, or a gateway, said so in its log
    pause_s: float  # the longest that any stream stood still over it
    recomputed_tokens: int
    streams_lost: int


def detected_after(moment: float) -> float:
    """Seconds from a moment (since the epoch) to the first line of any log that tells of a loss."""
    from ray._private.worker import global_worker

    folder = Path(global_worker.node.get_session_dir_path()) / "logs"
    found = []
    for path in folder.rglob("*.err"):
        for line in path.read_text(errors="replace").splitlines():
            told = _LOSS.match(line)
            if told is not None:
                at = datetime.strptime(told[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found += [at - moment] if at >= moment else []
    return min(found, default=math.nan)


class Trial:
    """Undisturbed answers first, then the same with faults."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._url = url
        self._service = Service(url)
        self._draw = random.Random(seed)
        first = Run(url, bodies(model, seed)).wait()
        greedy = first[11].texts[0]
        self._model = model
        self._requests = bodies(model, seed, stop=greedy[len(greedy) // 2 :][:6])
        self.expected = Run(url, self._requests).wait()
        assert all(stream.error is None and stream.is_done for stream in self.expected), self.expected
        assert self.expected[-1].calls, "the last one calls a tool"

    def strike(self, faults: list[tuple[str, int]]) -> list[FaultCost]:
        """Faults and ranks, one after the other while the streams run; each when the one before is overcome."""
        in_all = sum(stream.num_characters for stream in self.expected)
        run = Run(self._url, self._requests)
        embeddings = Embeddings(self._url, self._model)
        struck: list[tuple[str, float, float, int]] = []
        for number, (fault, rank) in enumerate(faults):
            share = (number + self._draw.uniform(0.3, 0.7)) / (len(faults) + 0.5)
            wait_for(lambda at=share * in_all: run.num_characters >= at or run.is_over, 240, lambda: run.num_characters)
            assert not run.is_over, f"{fault} comes too late"
            moment, before = time.monotonic(), run.num_characters
            struck.append((fault, moment, time.time(), self._total("quire:recomputed_tokens_total")))
            recoveries = self._total("quire:recoveries_total")
            self._service.post("/chaos", {"fault": fault, "rank": rank, "engine": None})
            if fault != "kill-engine":
                wait_for(lambda count=recoveries: self._total("quire:recoveries_total") > count, 120)
                before = run.num_characters
            wait_for(lambda at=before: run.num_characters > at + 4 * len(self._requests) or run.is_over, 240)
        streams = run.wait()
        embeddings.stop()
        assert embeddings.num_answers > len(faults)
        lost = [self.difference(expected, got) for expected, got in zip(self.expected, streams, strict=True)]
        assert not any(lost), [line for line in lost if line]
        after = [entry[3] for entry in struck[1:]] + [self._total("quire:recomputed_tokens_total")]
        ends = [entry[1] for entry in struck[1:]] + [math.inf]
        return [
            FaultCost(
                fault,
                detected_after(since_epoch),
                max(stream.longest_pause(moment, until) for stream in streams),
                # A new engine counts from zero.
                then - before if then >= before else then,
                0,
            )
            for (fault, moment, since_epoch, before), then, until in zip(struck, after, ends, strict=True)
        ]

    def difference(self, expected: Stream, got: Stream) -> str | None:
        """How an answer is not what it would have been."""
        if got.error is not None or not got.is_done:
            return f"error: {got.error}, done: {got.is_done}"
        for name in ("texts", "calls", "ends", "usage"):
            if getattr(got, name) != getattr(expected, name):
                return f"{name}: {getattr(got, name)} instead of {getattr(expected, name)}"
        for index, values in expected.logprobs.items():
            pairs = list(zip(values, got.logprobs[index], strict=True))
            if any(abs(one - other) > LOGPROB_TOLERANCE for one, other in pairs):
                return f"logprobs: {pairs}"
        return None

    def check_nothing_is_held(self) -> None:
        """No row, no block, nobody waiting, and a new request is served."""
        names = ("num_requests_running", "num_requests_waiting", "num_used_kv_blocks")
        wait_for(
            lambda: all(self._total(f"quire:{name}") == 0 for name in names),
            20,
            lambda: {name: self._total(f"quire:{name}") for name in names},
        )
        again = Run(self._url, self._requests[:1]).wait()
        assert self.difference(self.expected[0], again[0]) is None

    def _total(self, name: str) -> int:
        samples: Samples = self._service.samples()
        return int(sum(value for (sample, _), value in samples.items() if sample == name))
