"""Stop strings against a plain reading of the whole text, however it is divided."""

from __future__ import annotations

import random

import pytest

from quire.engine.stop_strings import StopMatch, StopStringMatcher


def feed(matcher: StopStringMatcher, parts: list[str]) -> tuple[list[str], str | None]:
    """What is shown after each part (and at the end), and the stop string that was found."""
    shown = []
    for part in parts:
        result = matcher.push(part)
        if isinstance(result, StopMatch):
            return [*shown, result.text], result.stop
        shown.append(result)
    return [*shown, matcher.finish()], None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "found"),
    [
        (("\n\n",), ["a\n", "\nb"], ["a", ""], "\n\n"),
        (("\n\n",), ["a\n", "b"], ["a", "\nb", ""], None),
        (("END",), ["xE", "N", "E", "ND"], ["x", "", "EN", ""], "END"),
        (("END",), ["the E", "N"], ["the ", "", "EN"], None),
        (("abc", "b"), ["abc"], ["a"], "b"),  # the first to be complete
        (("b", "ab"), ["xab"], ["x"], "ab"),  # of two that end together the longer
        (("aab",), ["aa", "a", "b"], ["", "a", ""], "aab"),  # the beginning moves on
        (("🎉",), ["party 🎉 on"], ["party "], "🎉"),
        (("a",), ["", "b"], ["", "b", ""], None),
    ],
)
def test_examples(stops: tuple[str, ...], parts: list[str], shown: list[str], found: str | None) -> None:
    assert feed(StopStringMatcher(stops), parts) == (shown, found)


def test_the_stop_string_is_shown_when_it_is_included() -> None:
    assert feed(StopStringMatcher(("END",), include=True), ["x E", "NDy"]) == (["x ", "END"], "END")


def test_a_stop_string_that_ends_while_not_armed_is_text() -> None:
    matcher = StopStringMatcher(("bc", "abcd"))
    assert matcher.push("abc", armed=False) == ""  # the beginning of the other
    assert matcher.push("x") == "abcx"
    assert matcher.push("bc") == StopMatch("", "bc")


def test_one_begun_before_and_ended_after_counts() -> None:
    matcher = StopStringMatcher(("bc",))
    assert matcher.push("ab", armed=False) == "a"
    assert matcher.push("c") == StopMatch("", "bc")


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """By reading character by character: (start, end, stop)."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


@pytest.mark.parametrize("include", [False, True])
def test_random_texts(include: bool) -> None:
    generator = random.Random(3)
    for _ in range(5000):
        text = "".join(generator.choices("abc", k=generator.randrange(1, 20)))
        stops = tuple("".join(generator.choices("abc", k=generator.randrange(1, 6))) for _ in range(3))
        cuts = sorted(generator.randrange(len(text) + 1) for _ in range(4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, found = feed(StopStringMatcher(stops, include=include), parts)
        match = first_stop(text, stops)
        if match is None:
            assert ("".join(shown), found) == (text, None)
        else:
            assert ("".join(shown), found) == (text[: match[1] if include else match[0]], match[2])
        # Nothing is held back longer than needed: what is not shown yet begins a stop string.
        for i in range(len(shown) - 1):
            held = text[: sum(map(len, parts[: i + 1]))][sum(map(len, shown[: i + 1])) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
