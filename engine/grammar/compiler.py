"""From a `GrammarSpec` to something that answers can be held to. Runs in the gate's threads, off the hot path."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from ..config import GrammarConfig
from ..errors import InvalidRequestError
from ..outputs import EngineRequest
from .completion import Completer, Completion
from .constraint import Constraint
from .examples import example
from .json_schema import JSON_OPTIONS, Pointer, SubSchema, parts_of, prepare_schema, sub_schemas
from .request_fields import check_size
from .spec import GrammarSpec
from .symbol_state import SymbolState, comes_back
from .vocabulary import Vocabulary

_LITERAL = re.compile(r'"((?:[^"\\]|\\.){1,64})"|/((?:[^/\\]|\\.){1,256})/')
_NUMBERED_TOKEN = re.compile(r"<\[[\d*^]")
_TOKEN_ID = re.compile(r"<\[(\d+)\]>")
_SHOWN_CHARS = 400
_MAX_TRIALS = 32  # compilations that look for what in a schema is refused


class Grammar:
    """A compiled grammar: where its answers begin, in tokens and in symbols, and the shortest of them.

    Read by the engine's thread alone once it is compiled; `Constraint` copies the matchers.
    """

    def __init__(self, vocabulary: Vocabulary, tokens: Any, symbols: Any, completer: Completer) -> None:
        self.vocabulary = vocabulary
        self.tokens = tokens
        self.symbols = symbols
        self.completer = completer
        self.shortest = Completion(vocabulary, [])  # until it is found
        self._comes_back = comes_back(symbols)

    def begin(self) -> SymbolState:
        """Where an answer begins."""
        return SymbolState(self.symbols, comes_back=self._comes_back)

    def open(self, source: EngineRequest, num_left: int) -> Constraint:
        """Hold a request to the grammar; it goes on after the tokens that it resumes with. Raises `QuireError`."""
        resumed = source.resume_token_ids
        constraint = Constraint(self, source, num_left + len(resumed))
        constraint.replay(resumed, num_left + len(resumed))
        return constraint


class LlguidanceCompiler:
    """Compiles what a `GrammarGate` asks for. The vocabulary is built by the first grammar that needs it.

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
        check_size(spec, self._config)
        source = self._llguidance_source(spec)
        vocabulary = self._load_vocabulary(spec)
        limits = LLParserLimits(
            max_grammar_size=self._config.max_grammar_size,
            initial_lexer_fuel=self._config.max_lexer_fuel,
            verbose_errors=False,
        )
        in_symbols = source if spec.kind != "lark" else _with_symbols(source, vocabulary)
        symbols = LLMatcher(vocabulary.symbols, in_symbols, log_level=0, limits=limits)
        if symbols.is_error():
            where = "" if spec.kind != "json_schema" else _first_refused(spec, limits)
            raise _refusal(spec, f"cannot be compiled: {where}{symbols.get_error()[:_SHOWN_CHARS]}")
        tokens = LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)
        if tokens.is_error():
            raise _refusal(spec, f"cannot be compiled: {tokens.get_error()[:_SHOWN_CHARS]}")
        completer = Completer(vocabulary, _literals(spec), json=spec.kind in ("json_schema", "json_object"))
        grammar = Grammar(vocabulary, tokens, symbols, completer)
        grammar.shortest = self._shortest(spec, completer, grammar.begin())
        _check_path(spec, vocabulary, tokens, grammar.shortest)
        return grammar

    def _llguidance_source(self, spec: GrammarSpec) -> str:
        """The grammar in the form that llguidance's matchers take. Raises `InvalidRequestError`."""
        match spec.kind:
            case "json_schema":
                schema = prepare_schema(json.loads(spec.source), spec.param, self._config.max_schema_depth)
                return _json_grammar(schema)
            case "json_object":
                return _json_grammar({"type": "object"})
            case "regex":
                return LLMatcher.grammar_from_regex(spec.source)
            case "choice":
                # One terminal: as rules, every choice would be an item of the parser at every byte.
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.source))
                return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
            case "lark" | "ebnf":
                if spec.kind == "ebnf" and _NUMBERED_TOKEN.search(spec.source):
                    raise _refusal(spec, "names a token by number; write special tokens by name, as <|name|>")
                try:
                    return grammar_from("lark" if spec.kind == "lark" else "ebnf", spec.source)
                except Exception as error:  # reading GBNF raises anything for what cannot be read
                    raise _refusal(spec, f"cannot be read: {str(error)[:_SHOWN_CHARS]}") from error

    def _load_vocabulary(self, spec: GrammarSpec) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = Vocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
                except Exception as error:
                    raise _refusal(spec, f"is not possible with this model's tokenizer ({error})") from error
            return self._vocabulary

    def _shortest(self, spec: GrammarSpec, completer: Completer, beginning: SymbolState) -> Completion:
        found = completer.walk(beginning, self._config.max_search_steps)
        if found is None:
            why = completer.problem or "no answer that ends was found in max_search_steps"
            raise _refusal(spec, f"cannot be used: {why[:_SHOWN_CHARS]}")
        return completer.improve(beginning, found, self._config.max_search_steps, learn=True)


def _check_path(spec: GrammarSpec, vocabulary: Vocabulary, tokens: Any, path: Completion) -> None:
    """The path was found over bytes: the matcher over tokens has to agree."""
    matcher = tokens.deep_copy()
    rest: Completion | None = path
    while rest is not None and len(rest):
        token_id = rest.first_token()
        if not matcher.consume_token(token_id):
            raise _refusal(spec, f"cannot be written in the tokens of this model: {matcher.get_error()[:_SHOWN_CHARS]}")
        rest = rest.after(vocabulary.symbols_of(token_id))
    if not matcher.is_accepting():
        raise _refusal(spec, "cannot be written in the tokens of this model")


def _json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=JSON_OPTIONS)  # type: ignore[arg-type]


def _first_refused(spec: GrammarSpec, limits: LLParserLimits) -> str:
    """Where in a schema that llguidance refuses the reason is: a part that it refuses by itself, and none inside it.

    Down from the top, by halves of the parts that a part has, as far as `_MAX_TRIALS` compilations lead.
    """
    schema = prepare_schema(json.loads(spec.source), spec.param)
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    num_left = _MAX_TRIALS

    def refused(parts: list[SubSchema]) -> bool:
        nonlocal num_left
        num_left -= 1
        together = {"type": "array", "prefixItems": [part.schema for part in parts], "minItems": len(parts)}
        return bool(LLMatcher.validate_grammar(_json_grammar({**shared, **together}), limits=limits))

    found = SubSchema(Pointer(), schema, 0)
    suspects = parts_of(found)
    while suspects and num_left > 0 and refused(suspects):
        while len(suspects) > 1 and num_left > 0:
            half = suspects[: len(suspects) // 2]
            suspects = half if refused(half) else suspects[len(half) :]
        if len(suspects) > 1 or num_left == 0 or not refused(suspects):  # they are too much only together
            break
        found = suspects[0]
        suspects = parts_of(found)
    return f"{str(found.pointer) or '/'}: "


def _with_symbols(source: str, vocabulary: Vocabulary) -> str:
    """Special tokens that are given by their ids, as the symbols that they are."""
    return _TOKEN_ID.sub(lambda found: f"<[{vocabulary.symbols_of(int(found[1]))[0]}]>", source)


def _literals(spec: GrammarSpec) -> list[bytes]:
    """Texts that may have to be said to get to an end, as the source of a grammar tells."""
    match spec.kind:
        case "json_schema":
            found = [example(pattern) for pattern in _patterns(json.loads(spec.source))]
        case "regex":
            found = [example(spec.source)]
        case "lark" | "ebnf":
            found = [quoted or example(pattern) for quoted, pattern in _LITERAL.findall(spec.source)]
        case _:
            found = []
    return list(dict.fromkeys(text.encode() for text in found if text))


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    for part in sub_schemas(schema):
        for pattern in (part.schema.get("pattern"), *(part.schema.get("patternProperties") or ())):
            if isinstance(pattern, str):
                yield pattern


def _refusal(spec: GrammarSpec, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{spec.param}: the {spec.kind.replace('_', ' ')} {problem}.", spec.param)
