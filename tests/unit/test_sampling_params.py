"""What `SamplingParams` refuses: by field, value and allowed range, before anything is scheduled."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n", 0, "an integer from 1 to 128, got 0"),
        ("n", True, "an integer from 1 to 128, got True"),
        ("max_tokens", -1, "an integer >= 0, got -1"),
        ("max_tokens", 1.5, "an integer >= 0, got 1.5"),
        ("min_tokens", 17, "an integer from 0 to 16, got 17"),  # more than max_tokens
        ("temperature", -0.1, "a number >= 0 and <= 2, got -0.1"),
        ("temperature", NAN, "a number >= 0 and <= 2, got nan"),
        ("temperature", "1", "a number >= 0 and <= 2, got '1'"),
        ("top_p", 0.0, "a number > 0 and <= 1, got 0.0"),
        ("top_p", INF, "a number > 0 and <= 1, got inf"),
        ("top_k", -2, "an integer from 0 to 2147483647, got -2"),
        ("top_k", -1.0, "an integer from 0 to 2147483647, got -1.0"),
        ("top_k", 2**64, f"an integer from 0 to 2147483647, got {2**64}"),
        ("min_p", 1.1, "a number >= 0 and <= 1, got 1.1"),
        ("presence_penalty", 2.1, "a number >= -2 and <= 2, got 2.1"),
        ("frequency_penalty", -INF, "a number >= -2 and <= 2, got -inf"),
        ("repetition_penalty", 1e-40, "a number >= 0.01 and <= 100, got 1e-40"),
        ("repetition_penalty", 0, "a number >= 0.01 and <= 100, got 0"),
        ("seed", 2**63, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("logprobs", 21, "an integer from 0 to 20, got 21"),
        ("prompt_logprobs", 21, "an integer from 0 to 20, got 21"),
        ("prompt_logprobs", True, "an integer from 0 to 20, got True"),
        ("stop", [""], "must be non-empty strings, got ''"),
        ("stop", [5], "must be non-empty strings, got 5"),
        ("stop", 5, "must be a list, got 5"),
        ("stop", {"a", "b"}, "must be a list, got {"),
        ("stop", ["a"] * 17, "17 entries given, at most 16 are allowed"),
        ("stop", ["a" * 1025], "a string of 1025 characters given, at most 1024 are allowed"),
        ("stop_token_ids", 7, "must be a list, got 7"),
        ("stop_token_ids", [-1], "an integer >= 0, got -1"),
        ("stop_token_ids", list(range(129)), "129 entries given, at most 128 are allowed"),
        ("allowed_token_ids", [], "must hold at least one token id"),
        ("allowed_token_ids", 7, "must be a list, got 7"),
        ("allowed_token_ids", [1, -1], "an integer >= 0, got -1"),
        ("allowed_token_ids", [True], "an integer >= 0, got True"),
        ("allowed_token_ids", range(3), "must be a list, got range(0, 3)"),
        ("allowed_token_ids", [1] * 16_385, "16385 entries given, at most 16384 are allowed"),
        ("bad_words", "word", "must be a list, got 'word'"),
        ("bad_words", [""], "must be non-empty strings, got ''"),
        ("bad_words", ["a"] * 257, "257 entries given, at most 256 are allowed"),
        ("bad_words", ["a" * 257], "a string of 257 characters given, at most 256 are allowed"),
        ("logit_bias", [1], "must map token ids to numbers, got [1]"),
        ("logit_bias", {1: 101}, "a number >= -100 and <= 100, got 101"),
        ("logit_bias", {-1: 1}, "an integer >= 0, got -1"),
        ("logit_bias", dict.fromkeys(range(301), 1.0), "301 entries given, at most 300 are allowed"),
        ("ignore_eos", "no", "must be true or false, got 'no'"),
        ("skip_special_tokens", None, "must be true or false, got None"),
        ("include_stop_str_in_output", 1, "must be true or false, got 1"),
    ],
)
def test_refusals_name_field_value_and_range(field: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ")
    assert said in caught.value.message


def test_short_forms() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], top_k=-1, logit_bias=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.top_k) == (("end",), (3, 4), 0)
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
