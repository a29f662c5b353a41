"""A matcher goes on and comes back: everything is as before, and it is not copied for it."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import make_request
from grammar_helpers import compiler, model, schema_spec

from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.symbol_state import SymbolState, comes_back

ITEMS = schema_spec({"type": "array", "items": {"type": "object"}})
GRAMMARS = {
    "json": (ITEMS, b'[{"a": [1, 2.5e3, null]}, {}]'),
    "regex": (GrammarSpec(kind="regex", source="(ab|cd){2,6}[0-9]{3}x*"), b"abcdab123xx"),
    "suffix": (GrammarSpec(kind="lark", source='start: foo "x"\nfoo[suffix="z"]: /[a-y]*/'), b"abczx"),
    "stop": (GrammarSpec(kind="lark", source='start: foo "x"\nfoo[stop="z"]: /[a-y]*/'), b"abczx"),
    "max_tokens": (GrammarSpec(kind="lark", source='start: foo "!"\nfoo[max_tokens=5]: /[a-z]*/'), b"abcd!"),
}


def look(state: SymbolState) -> tuple[int, bool, list[int]]:
    return state.allowed(), state.is_accepting(), state.forced()


class CountedMatcher:
    """A matcher that counts how often it is copied."""

    num_copies = 0

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def deep_copy(self) -> CountedMatcher:
        CountedMatcher.num_copies += 1
        return CountedMatcher(self._matcher.deep_copy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.mark.parametrize("name", GRAMMARS)
def test_everything_is_as_before(name: str) -> None:
    spec, text = GRAMMARS[name]
    grammar = compiler().compile(spec)
    state = grammar.begin()
    for i in range(len(text)):
        before = look(state)
        for end in range(i + 1, len(text) + 1):
            mark = state.mark()
            assert state.take(list(text[i:end]))
            afterwards = grammar.begin()
            assert afterwards.take(list(text[:end]))
            assert look(state) == look(afterwards)
            state.back_to(mark)
            assert look(state) == before
        assert state.take([text[i]])
    assert state.is_accepting()


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_not_allowed_changes_nothing(name: str) -> None:
    spec, text = GRAMMARS[name]
    state = compiler().compile(spec).begin()
    assert state.take(list(text[:3]))
    before = look(state)
    mark = state.mark()
    assert not state.allows([*text[3:4], ord("\0")])
    assert not state.take([*text[3:4], ord("\0")])
    state.back_to(mark)
    assert look(state) == before
    assert state.completes(list(text[3:])) == (name != "stop")  # of which llguidance cannot say what would follow
    assert not state.completes(list(text[3:-1])) or name == "regex"
    assert look(state) == before
    assert state.take(list(text[3:]))


def test_which_grammars_come_back() -> None:
    found = {name: comes_back(compiler().compile(spec).symbols) for name, (spec, _) in GRAMMARS.items()}
    assert found == {"json": True, "regex": True, "suffix": True, "stop": False, "max_tokens": False}


def test_a_long_answer_is_not_copied_for_its_tokens() -> None:
    info, tokenizer = model()
    grammar = compiler().compile(ITEMS)
    text = "[" + ", ".join(['{"a": "hello", "b": [1, 2, {"c": null}]}'] * 30)
    token_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    grammar.symbols = CountedMatcher(grammar.symbols)
    request = make_request("r", [1], 10_000, eos_token_ids=tuple(info.eos_token_ids), grammar=ITEMS)
    constraint = grammar.open(request, 10_000)
    CountedMatcher.num_copies = 0
    assert all(constraint.accept(token_id, 9_999 - i) for i, token_id in enumerate(token_ids))
    assert len(token_ids) > 500
    assert CountedMatcher.num_copies == 0
