"""From prompts and parameters to engine requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import byte_level

from quire.engine.errors import InvalidRequestError
from quire.engine.input_processor import InputProcessor, RequestOptions
from quire.engine.model_source import Implementation, ModelInfo
from quire.engine.sampling_params import MAX_SEED, SamplingParams

NATIVE = Implementation("native", "for a test")
INFO = ModelInfo(
    "tiny", Path("tiny"), "safetensors", {}, NATIVE, vocab_size=600, max_model_len=10, eos_token_ids=(5, 6)
)


def processor(seed: int | None = 0) -> InputProcessor:
    return InputProcessor(INFO, byte_level(), seed=seed)


def test_each_choice_is_a_request_with_the_same_seed() -> None:
    options = RequestOptions(priority=2, cache_salt="s", deadline_ms=70, tenant="t", tenant_weight=2.0)
    requests = processor().process("id", [1, 2, 3], SamplingParams(n=3, max_tokens=4, seed=7), options=options)
    assert [request.request_id for request in requests] == ["id", "id-1", "id-2"]
    assert [request.choice_index for request in requests] == [0, 1, 2]
    assert {request.seed for request in requests} == {7}
    first = requests[0]
    assert (first.prompt_token_ids, first.eos_token_ids, first.priority, first.cache_salt) == (
        [1, 2, 3],
        (5, 6),
        2,
        "s",
    )
    assert (first.deadline_ms, first.tenant, first.tenant_weight) == (70, "t", 2.0)
    assert first.sampling_params.max_tokens == 4


@pytest.mark.parametrize("bad", [[1.5, 2], ["a"], [None], [1 << 70]])
def test_token_ids_must_be_integers(bad: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: token ids must be integers") as caught:
        processor().process("id", bad, SamplingParams())
    assert caught.value.param == "prompt"


def test_numpy_token_ids_are_integers() -> None:
    [request] = processor().process("id", np.array([1, 2], dtype=np.int32), SamplingParams())
    assert request.prompt_token_ids == [1, 2]
    assert type(request.prompt_token_ids[0]) is int


def test_text_is_tokenized() -> None:
    one = processor()
    [request] = one.process("id", "the", SamplingParams())
    assert request.prompt_token_ids == one.tokenize("the") != []


@pytest.mark.parametrize(("given", "resolved"), [(None, 7), (100, 7), (7, 7), (2, 2)])
def test_max_tokens_is_what_the_context_leaves_at_most(given: int | None, resolved: int) -> None:
    [request] = processor().process("id", [1, 2, 3], SamplingParams(max_tokens=given))
    assert request.sampling_params.max_tokens == resolved


def test_drawn_seeds_repeat_with_the_processors_own_seed_and_differ_between_requests() -> None:
    def draw(seed: int | None) -> list[int]:
        one = processor(seed)
        return [one.process("id", [1], SamplingParams())[0].seed for _ in range(3)]

    assert draw(0) == draw(0)
    assert len({*draw(0), *draw(1), *draw(None)}) == 9
    assert all(0 <= seed <= MAX_SEED for seed in draw(None))


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code", "message"),
    [
        ([], {}, "prompt", None, "prompt: must hold at least one token, got none."),
        ("", {}, "prompt", None, "prompt: must hold at least one token, got none."),
        ([1, 600], {}, "prompt", None, "prompt: token ids must be from 0 to 599, got 600."),
        ([-1], {}, "prompt", None, "prompt: token ids must be from 0 to 599, got -1."),
        (
            [1] * 10,
            {},
            "prompt",
            "context_length_exceeded",
            "prompt: 10 tokens given, at most 9 are allowed: the model's context is 10 tokens, and one is needed for "
            "the answer.",
        ),
        (
            [1] * 8,
            {"min_tokens": 3},
            "min_tokens",
            None,
            "min_tokens: must be at most 2, the tokens that the context leaves after this prompt, got 3.",
        ),
        (
            [1],
            {"stop_token_ids": (600,)},
            "stop_token_ids",
            None,
            "stop_token_ids: token ids must be from 0 to 599, got 600.",
        ),
        (
            [1],
            {"allowed_token_ids": (1, 601, 600)},
            "allowed_token_ids",
            None,
            "allowed_token_ids: token ids must be from 0 to 599, got 601.",
        ),
        (
            [1],
            {"allowed_token_ids": (40, 41), "bad_words": ("J", "I", "no such word")},
            "allowed_token_ids",
            None,
            "allowed_token_ids: every token given is one of bad_words.",
        ),
        ([1], {"logit_bias": {700: 1.0}}, "logit_bias", None, "logit_bias: token ids must be from 0 to 599, got 700."),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    prompt: Any, params: dict[str, Any], param: str, code: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("id", prompt, SamplingParams(max_tokens=None, **params))
    assert (caught.value.param, caught.value.code, caught.value.message) == (param, code, message)


def test_bad_words_become_tokens_with_and_without_a_space_before_them() -> None:
    one = processor()

    def ids(text: str) -> tuple[int, ...]:
        return tuple(one.tokenize(text, add_special_tokens=False))

    params = SamplingParams(bad_words=("king", " fox", "ing", "\n", "king"), n=2)
    requests = one.process("id", [1], params)
    expected = (ids("king"), ids(" king"), ids("fox"), ids(" fox"), ids("ing"), ids(" ing"), ids("\n"))
    assert [request.sampling_params.bad_words_token_ids for request in requests] == [expected] * 2
    assert len(ids("ing")) == 1 < len(ids("king"))
    assert one.process("id", [1], SamplingParams())[0].sampling_params.bad_words_token_ids == ()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    one = processor()
    longest = max(map(len, byte_level().backend_tokenizer.get_vocab()))
    one.check_length("x" * 10 * longest)
    with pytest.raises(InvalidRequestError) as caught:
        one.check_length("x" * (10 * longest + 1), "messages")
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_the_prompt_is_named_as_the_user_knows_it() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("id", [], SamplingParams(), param="messages")
    assert caught.value.param == "messages"
