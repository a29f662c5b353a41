"""From engine outputs to what users receive."""

from __future__ import annotations

import random
from typing import Any

import pytest
from small_tokenizers import TEXTS, byte_level

from quire.engine.detokenizer import TokenDecoder
from quire.engine.errors import EngineError
from quire.engine.output_processor import OutputProcessor, RequestState
from quire.engine.outputs import CompletionOutput, EngineOutput, EngineRequest, TokenLogprobs
from quire.engine.sampling_params import SamplingParams

TOKENIZER = byte_level()
BACKEND = TOKENIZER.backend_tokenizer
DECODER = TokenDecoder(TOKENIZER)
END = BACKEND.token_to_id("<|end|>")


def ids(text: str) -> list[int]:
    token_ids: list[int] = BACKEND.encode(text, add_special_tokens=False).ids
    return token_ids


def chars(text: str) -> list[int]:
    """One token per byte, so that tests know where tokens end."""
    return [token_id for char in text for token_id in [BACKEND.token_to_id("Ġ" if char == " " else char)]]


def request(request_id: str = "r", choice_index: int = 0, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=100, **params),
        seed=0,
        choice_index=choice_index,
    )


def state(**params: Any) -> RequestState:
    return RequestState(request(**params), DECODER)


def output(first_index: int, token_ids: list[int], finish: Any = None, **more: Any) -> EngineOutput:
    return EngineOutput(more.pop("request_id", "r"), first_index, token_ids, finish, **more)


def push_each(target: RequestState, token_ids: list[int], finish: Any = "length") -> list[CompletionOutput]:
    """One output per token; the last one ends the answer."""
    deltas = []
    for i, token_id in enumerate(token_ids):
        delta = target.push(output(i, [token_id], finish if i == len(token_ids) - 1 else None))
        if delta is not None:
            deltas.append(delta)
    return deltas


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_deltas_join_to_the_whole_decode(text: str) -> None:
    target, token_ids = state(), ids(text)
    deltas = push_each(target, token_ids)
    assert "".join(delta.text for delta in deltas) == target.text == BACKEND.decode(token_ids)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == target.token_ids == token_ids
    assert deltas[-1].finish_reason == "length"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_the_division_into_outputs_does_not_matter() -> None:
    generator = random.Random(4)
    for _ in range(200):
        token_ids = ids("".join(generator.sample(TEXTS, 2)))
        if not token_ids:
            continue
        text = BACKEND.decode(token_ids)
        start = generator.randrange(len(text) + 1)
        stop = text[start : start + 3] or "never"
        by_one, by_some = state(stop=(stop,)), state(stop=(stop,))
        push_each(by_one, token_ids)
        i = 0
        while i < len(token_ids):
            step = generator.randrange(1, 5)
            by_some.push(output(i, token_ids[i : i + step], "length" if i + step >= len(token_ids) else None))
            i += step
        assert (by_one.text, by_one.token_ids, by_one.finish_reason, by_one.stop_reason) == (
            by_some.text,
            by_some.token_ids,
            by_some.finish_reason,
            by_some.stop_reason,
        )


def test_tokens_received_twice_are_ignored() -> None:
    target = state()
    assert target.push(output(0, chars("ab"))).text == "ab"
    assert target.push(output(0, chars("ab"))) is None
    assert target.push(output(1, chars("bcd"))).text == "cd"
    last = target.push(output(2, chars("cd"), "length"))
    assert (last.text, last.token_ids, last.finish_reason) == ("", [], "length")
    assert target.push(output(4, chars("x"))) is None
    assert target.text == "abcd"


def test_a_gap_is_an_error() -> None:
    target = state()
    target.push(output(0, chars("ab")))
    with pytest.raises(EngineError, match=r"tokens 2 to 4 of the answer were lost"):
        target.push(output(5, chars("x")))


def test_a_stop_string_cuts_the_text_but_not_the_tokens() -> None:
    target = state(stop=("cd",))
    assert [delta.text for delta in push_each(target, chars("abcdef"))] == ["a", "b", ""]
    assert (target.text, target.token_ids, target.finish_reason, target.stop_reason) == (
        "ab",
        chars("abcd"),
        "stop",
        "cd",
    )
    assert target.stopped_here


def test_tokens_of_held_text_come_with_it() -> None:
    target = state(stop=("cdx",))
    deltas = push_each(target, chars("abcdef"))
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("a", chars("a")),
        ("b", chars("b")),
        ("cde", chars("cde")),
        ("f", chars("f")),
    ]


def test_a_stop_string_in_the_last_token_of_the_engine_needs_no_abort() -> None:
    target = state(stop=("c",))
    target.push(output(0, chars("abc"), "length"))
    assert (target.text, target.finish_reason, target.stop_reason, target.stopped_here) == ("ab", "stop", "c", False)


def test_held_text_is_shown_when_the_engine_ends() -> None:
    target = state(stop=("cd",))
    target.push(output(0, chars("abc"), "length"))
    assert (target.text, target.finish_reason, target.stop_reason) == ("abc", "length", None)


def test_min_tokens_delays_stop_strings() -> None:
    target = state(stop=("b",), min_tokens=3)
    push_each(target, chars("abcbd"))
    assert (target.text, target.token_ids) == ("abc", chars("abcb"))


def test_include_stop_str_in_output() -> None:
    target = state(stop=("cd",), include_stop_str_in_output=True)
    push_each(target, chars("abcdef"))
    assert (target.text, target.stop_reason) == ("abcd", "cd")


@pytest.mark.parametrize(
    ("params", "text"),
    [({}, "ab"), ({"include_stop_str_in_output": True}, "abz"), ({"skip_special_tokens": False}, "ab")],
)
def test_the_stop_token_is_a_token_but_not_text(params: dict[str, Any], text: str) -> None:
    target = state(stop_token_ids=tuple(chars("z")), **params)
    last = target.push(output(0, chars("abz"), "stop", stop_reason=chars("z")[0]))
    assert (target.text, target.token_ids, last.stop_reason) == (text, chars("abz"), chars("z")[0])


def test_eos_is_not_text_and_ends_half_a_character() -> None:
    target = state()
    smile = [BACKEND.token_to_id(char) for char in "ðŁĻĤ"]
    assert target.push(output(0, [*chars("a"), *smile[:2]])).text == "a"
    assert target.push(output(3, [END], "stop")).text == "\ufffd"


def test_logprobs_stay_with_their_tokens() -> None:
    entries = [TokenLogprobs(token_id, -float(i), 1, []) for i, token_id in enumerate(chars("abcd"))]
    target = state(logprobs=0, stop=("cx",))
    target.push(output(0, chars("ab"), logprobs=entries[:2]))
    delta = target.push(output(1, chars("bcd"), "length", logprobs=entries[1:]))
    assert delta.logprobs == entries[2:]
    assert target.completion().logprobs == entries
    assert delta.cumulative_logprob == target.cumulative_logprob == -6.0


def test_an_error_of_one_request() -> None:
    target = state()
    delta = target.push(output(0, [], "error", error="its grammar failed"))
    assert (delta.finish_reason, target.error) == ("error", "its grammar failed")


def choices(n: int, request_id: str = "r") -> list[EngineRequest]:
    return [request(request_id if i == 0 else f"{request_id}-{i}", i, n=n, stop=("z",)) for i in range(n)]


def test_choices_are_merged_in_order_when_all_have_ended() -> None:
    processor = OutputProcessor(DECODER)
    processor.add("prompt", choices(2))
    first = processor.process([output(0, chars("ab"), "length", request_id="r-1")])
    assert (first.request_outputs, first.abort_ids, processor.num_unfinished) == ([], [], 1)
    last = processor.process([output(0, chars("xz"), num_cached_tokens=2), output(2, chars("y"))])
    assert last.abort_ids == ["r"]
    [result] = last.request_outputs
    assert (result.request_id, result.prompt, result.finished, result.num_cached_tokens) == ("r", "prompt", True, 2)
    assert [(o.index, o.text, o.finish_reason) for o in result.outputs] == [(0, "x", "stop"), (1, "ab", "length")]
    assert processor.num_unfinished == 0


def test_deltas_hold_only_the_choices_that_changed() -> None:
    processor = OutputProcessor(DECODER, "delta")
    processor.add(None, choices(2))
    [one] = processor.process([output(0, chars("a"), request_id="r-1")]).request_outputs
    assert [(o.index, o.text) for o in one.outputs] == [(1, "a")]
    both = processor.process([output(0, chars("b")), output(1, chars("c"), "length", request_id="r-1")])
    assert [(o.index, o.text) for o in both.request_outputs[0].outputs] == [(0, "b"), (1, "c")]
    assert not both.request_outputs[0].finished


def test_cumulative_outputs_repeat_the_answer() -> None:
    processor = OutputProcessor(DECODER, "cumulative")
    processor.add(None, choices(1))
    texts = [
        processor.process([output(i, [token_id])]).request_outputs[0].outputs[0].text
        for i, token_id in enumerate(chars("abc"))
    ]
    assert texts == ["a", "ab", "abc"]


def test_discarded_and_unknown_requests_are_ignored() -> None:
    processor = OutputProcessor(DECODER)
    processor.add(None, choices(2, "a"))
    processor.add(None, choices(1, "b"))
    processor.discard(["a"])
    assert processor.num_unfinished == 1
    outputs = [output(0, chars("a"), "length", request_id=request_id) for request_id in ("a", "a-1", "b", "c")]
    assert [result.request_id for result in processor.process(outputs).request_outputs] == ["b"]
