"""From a `GrammarSpec` to something that answers can be held to. Runs in the gate's threads, off the hot path."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from ..config import GrammarConfig
from ..errors import InvalidRequestError
from ..outputs import EngineRequest
from .completion import Completer, Completion
from .constraint import Constraint
from .spec import GrammarSpec
from .vocabulary import Vocabulary

_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.){1,64})"|([\w<>/=-]{2,64})')
_NUMBERED_TOKEN = re.compile(r"<\[[\d*^]")
_TOKEN_ID = re.compile(r"<\[(\d+)\]>")
_SHOWN_CHARS = 400


class Grammar:
    """A compiled grammar: where its answers begin, in tokens and in symbols, and the shortest of them.

    Read by the engine's thread alone once it is compiled; `Constraint` copies the matchers.
    """

    def __init__(self, vocabulary: Vocabulary, tokens: Any, symbols: Any, completer: Completer, shortest: Completion):
        self.vocabulary = vocabulary
        self.tokens = tokens
        self.symbols = symbols
        self.completer = completer
        self.shortest = shortest

    def open(self, source: EngineRequest, num_left: int) -> Constraint:
        """Hold a request to the grammar; it goes on after the tokens that it resumes with. Raises `QuireError`."""
        resumed = source.resume_token_ids
        constraint = Constraint(self, source, num_left + len(resumed))
        constraint.replay(resumed, num_left + len(resumed))
        return constraint


class LlguidanceCompiler:
    """Implements `GrammarCompiler`. The vocabulary is built by the first grammar that needs it.

    `load_tokenizer` gives a fast tokenizer of transformers.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        config: GrammarConfig,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._config = config
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises `InvalidRequestError`, naming the user's field and what is wrong with what he gave."""
        if len(spec.source) > self._config.max_source_bytes:
            raise _refusal(
                spec, f"has {len(spec.source)} characters, at most {self._config.max_source_bytes} are allowed"
            )
        vocabulary = self._load_vocabulary(spec)
        source = _llguidance_source(spec)
        limits = LLParserLimits(
            max_grammar_size=self._config.max_grammar_size,
            initial_lexer_fuel=self._config.max_lexer_fuel,
            verbose_errors=False,
        )
        in_symbols = source if spec.kind != "lark" else _with_symbols(source, vocabulary)
        symbols = LLMatcher(vocabulary.symbols, in_symbols, log_level=0, limits=limits)
        if symbols.is_error():
            raise _refusal(spec, f"cannot be compiled: {symbols.get_error()[:_SHOWN_CHARS]}")
        tokens = LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)
        if tokens.is_error():
            raise _refusal(spec, f"cannot be compiled: {tokens.get_error()[:_SHOWN_CHARS]}")
        completer = Completer(vocabulary, _literals(spec))
        shortest = self._shortest(spec, completer, symbols)
        _check_path(spec, vocabulary, tokens, shortest)
        return Grammar(vocabulary, tokens, symbols, completer, shortest)

    def _load_vocabulary(self, spec: GrammarSpec) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = Vocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
                except Exception as error:
                    raise _refusal(spec, f"is not possible with this model's tokenizer ({error})") from error
            return self._vocabulary

    def _shortest(self, spec: GrammarSpec, completer: Completer, symbols: Any) -> Completion:
        found = completer.walk(symbols, self._config.max_search_steps)
        if found is None:
            why = "no answer that ends was found" if any(symbols.compute_bitmask()) else "nothing matches it"
            raise _refusal(spec, f"cannot be used: {why}")
        return completer.improve(symbols, found, self._config.max_search_steps, learn=True)


def _check_path(spec: GrammarSpec, vocabulary: Vocabulary, tokens: Any, path: Completion) -> None:
    """The path was found over bytes: the matcher over tokens has to agree."""
    matcher = tokens.deep_copy()
    rest: Completion | None = path
    while rest:
        token_id = rest.first_token()
        if not matcher.consume_token(token_id):
            raise _refusal(spec, f"cannot be written in the tokens of this model: {matcher.get_error()[:_SHOWN_CHARS]}")
        rest = rest.after(vocabulary.symbols_of(token_id))
    if not matcher.is_accepting():
        raise _refusal(spec, "cannot be written in the tokens of this model")


def _llguidance_source(spec: GrammarSpec) -> str:
    """The grammar in the form that llguidance's matchers take. Raises `InvalidRequestError`."""
    match spec.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.source, overrides={"lenient": False})
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(spec.source)
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "lark" | "ebnf":
            if spec.kind == "ebnf" and _NUMBERED_TOKEN.search(spec.source):
                raise _refusal(spec, "names a token by number; write special tokens by name, as <|name|>")
            try:
                return grammar_from("lark" if spec.kind == "lark" else "ebnf", spec.source)
            except ValueError as error:
                raise _refusal(spec, f"cannot be read: {str(error)[:_SHOWN_CHARS]}") from error


def _with_symbols(source: str, vocabulary: Vocabulary) -> str:
    """Special tokens that are given by their ids, as the symbols that they are."""
    return _TOKEN_ID.sub(lambda found: f"<[{vocabulary.symbols_of(int(found[1]))[0]}]>", source)


def _literals(spec: GrammarSpec) -> list[bytes]:
    """Text in the source of a grammar that may have to be said to get to its end. JSON has none that is not forced."""
    if spec.kind in ("json_schema", "json_object", "choice"):
        return []
    found = (quoted or plain for quoted, plain in _LITERAL.findall(spec.source))
    return list(dict.fromkeys(text.encode() for text in found))


def _refusal(spec: GrammarSpec, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{spec.param}: the {spec.kind.replace('_', ' ')} {problem}.", spec.param)
