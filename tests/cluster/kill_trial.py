"""Twelve streams of every kind, and faults that strike while they run: what each costs, and that nothing is lost."""

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
_LOSS = re.compile(r"\w+ (\S+ \S+) (?:engine|gateway) .*(?:A step failed|was lost)")
TIMEOUT = httpx.Timeout(240)
LOGPROB_TOLERANCE = 1e-3  # keys and values that are computed again in one piece differ in the last bits of float32


@dataclass
class Stream:
    """One streamed answer: what it came to, and when its events came."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    ends: dict[int, tuple[str, object]] = field(default_factory=dict)  # finish_reason, stop_reason
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # prompt and completion tokens
    is_done: bool = False
    error: str | None = None
    times: list[float] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        if "error" in event:
            self.error = event["error"]["message"]
        if event.get("usage"):
            self.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for choice in event.get("choices", []):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"] is not None:
                assert index not in self.ends, "a choice ends once"
                self.ends[index] = (choice["finish_reason"], choice["stop_reason"])

    def longest_pause(self, start: float, end: float) -> float:
        """Seconds of the longest wait for an event that began between two moments, or was under way at the first."""
        waits = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in waits if after > start and before < end), default=0.0)


def bodies(model: str, seed: int, stop: str | None = None) -> list[dict[str, Any]]:
    """Greedy, seeded, schema, regex, n = 2, logprobs, stop string: twelve in all."""
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
    return [{**common, "prompt": [draw.randrange(1, 199) for _ in range(NUM_PROMPT_TOKENS)], **kind} for kind in kinds]


class Run:
    """All bodies at once. `num_events` counts what has come from any of them."""

    def __init__(self, url: str, requests: list[dict[str, Any]]) -> None:
        self.streams = [Stream() for _ in requests]
        self.num_events = 0
        self._lock = threading.Lock()
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
    def is_over(self) -> bool:
        return all(done.done() for done in self._done)

    def _read(self, url: str, body: dict[str, Any], stream: Stream) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code}: {response.read().decode()}"
                return
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    stream.is_done = True
                elif line.startswith("data: "):
                    stream.take(json.loads(line.removeprefix("data: ")))
                    with self._lock:
                        self.num_events += 1


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
        greedy = first[-1].texts[0]
        self._requests = bodies(model, seed, stop=greedy[len(greedy) // 2 :][:6])
        self.expected = Run(url, self._requests).wait()

    def strike(self, faults: list[tuple[str, int]]) -> list[FaultCost]:
        """Faults and ranks, one after the other while the streams run; each when the one before is overcome."""
        per_stream = sum(len(stream.times) for stream in self.expected)
        run = Run(self._url, self._requests)
        struck: list[tuple[str, float, float, int]] = []
        for number, (fault, rank) in enumerate(faults):
            share = (number + self._draw.uniform(0.3, 0.7)) / (len(faults) + 0.5)
            wait_for(lambda at=share * per_stream: run.num_events >= at or run.is_over, 240, lambda: run.num_events)
            assert not run.is_over, f"{fault} comes too late"
            moment, events = time.monotonic(), run.num_events
            struck.append((fault, moment, time.time(), self._total("quire:recomputed_tokens_total")))
            recoveries = self._total("quire:recoveries_total")
            self._service.post("/chaos", {"fault": fault, "rank": rank, "engine": None})
            if fault != "kill-engine":
                wait_for(lambda before=recoveries: self._total("quire:recoveries_total") > before, 120)
                events = run.num_events
            wait_for(lambda at=events: run.num_events > at + 2 * len(self._requests) or run.is_over, 240)
        streams = run.wait()
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
        for name in ("texts", "ends", "usage"):
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
