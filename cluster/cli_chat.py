"""`quire chat`: a conversation in the terminal, with a server or with a model in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.engine.errors import QuireError

from .cli_http import base_url_of, error_message

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]  # a conversation to the pieces of the next answer


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Sampling of each answer; names as in the API."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None


def converse(answer: Answer, system: str | None) -> None:
    """Read a line, print the answer as it comes, until Ctrl-D or /exit. Ctrl-C ends an answer, or the program."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        line = _read_line()
        if line is None or line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
        elif line:
            asked: Message = {"role": "user", "content": line}
            text = _print_answer(answer([*messages, asked]))
            if text is not None:
                messages += [asked, {"role": "assistant", "content": text}]


def _read_line() -> str | None:
    """None at the end of input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - to be imported is all it needs to give input() arrow keys and a history
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _print_answer(pieces: Iterator[str]) -> str | None:
    """The whole text, or None when the answer failed. One that Ctrl-C cut short stays in the conversation as it is."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # only this answer ends
    except QuireError as error:
        print(f"quire: {error.message}", file=sys.stderr)
        return None
    print()
    return text


@contextmanager
def server_answers(url: str, model: str | None, api_key: str | None, options: ChatOptions) -> Iterator[Answer]:
    """Answers of an OpenAI-compatible server. Raises `QuireError` when it cannot be reached."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = base_url_of(url)
    with httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(10, read=300)) as client:
        try:
            listed = client.get("/models").raise_for_status().json()
            model = model or listed["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise QuireError(f"No model answers at {base_url}: {error}") from error

        def answer(messages: list[Message]) -> Iterator[str]:
            sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature, "top_p": options.top_p}
            body: dict[str, Any] = {"model": model, "messages": messages, "stream": True, **sampling}
            if options.seed is not None:
                body["seed"] = options.seed
            try:
                with client.stream("POST", "/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        raise QuireError(error_message(response.status_code, response.read()))
                    yield from _deltas(response.iter_lines())
            except httpx.HTTPError as error:
                raise QuireError(f"The server went away: {error}") from error

        yield answer


def _deltas(lines: Iterator[str]) -> Iterator[str]:
    """The text of a streamed chat completion."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise QuireError(f"The server failed: {event['error'].get('message', event['error'])}")
        for choice in event.get("choices", []):
            if content := choice["delta"].get("content"):
                yield content


@contextmanager
def offline_answers(engine: dict[str, Any], options: ChatOptions) -> Iterator[Answer]:
    """Answers of a model in this process; `engine` are arguments of `quire.LLM`."""
    from quire import LLM, SamplingParams

    llm = LLM(**engine)
    params = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )

    def answer(messages: list[Message]) -> Iterator[str]:
        for output in llm.stream(messages, params):
            yield output.outputs[0].text

    try:
        yield answer
    finally:
        llm.shutdown()
