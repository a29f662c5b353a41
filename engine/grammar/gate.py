"""Requests with a grammar wait here until it is compiled."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from ..errors import EngineError, InvalidRequestError, QuireError
from ..outputs import EngineRequest
from ..request import Request
from ..wait_ledger import WaitCause
from .constraint import Constraint
from .spec import GrammarSpec


class CompiledGrammar(Protocol):
    def open(self, source: EngineRequest, num_left: int) -> Constraint:
        """Hold a request to the grammar. `num_left` counts the tokens that may still come after those it resumes with.

        Raises `QuireError`: the request ends with it.
        """
        ...


CompileGrammar = Callable[[GrammarSpec], CompiledGrammar]


class GrammarGate:
    """A `Gate` that holds a request back until its grammar is compiled, off the hot path, and then opens a
    `Constraint` for it. Equal grammars are compiled once.

    `compile_grammar` may take long; it is called from another thread, and raises `InvalidRequestError`. `on_ready` is
    called from there whenever something is done. Compiled grammars are kept until there are more than `max_cached` of
    them; those under way are never given up. `num_threads` are compiled at a time.
    """

    cause = WaitCause.GRAMMAR

    def __init__(
        self,
        compile_grammar: CompileGrammar,
        on_ready: Callable[[], None],
        max_cached: int = 256,
        num_threads: int = 1,
    ) -> None:
        self.version = 0  # written by the threads below; any change will do
        self._versions = itertools.count(1)
        self._compile_grammar = compile_grammar
        self._on_ready = on_ready
        self._max_cached = max_cached
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="grammar")

    def enter(self, request: Request) -> bool:
        spec = request.source.grammar
        if spec is None or request.constraint is not None:  # it was preempted: what its tokens mean has not changed
            return True
        if request.compiling is None:
            request.compiling = self._compiling(spec)
        if not request.compiling.done():
            return False
        if (error := request.compiling.exception()) is not None:  # it ends the request
            raise copy.copy(error)  # raised itself, it would keep whatever stood around it for as long as it is known
        grammar = request.compiling.result()
        if request.output_token_ids:
            return self._resume(grammar, request)
        request.constraint = _opened(lambda: grammar.open(request.source, request.num_tokens_left))
        return True

    def may_enter(self, request: Request) -> bool:
        waits_for = request.opening or request.compiling
        return waits_for is None or waits_for.done()

    def leave(self, request: Request) -> None:
        """A compiled grammar is shared, and a constraint goes with its request."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _resume(self, grammar: CompiledGrammar, request: Request) -> bool:
        """Many tokens may have to be read again, which takes time."""
        if request.opening is None:
            source, num_left = request.source, request.num_tokens_left
            request.opening = self._submit(lambda: grammar.open(source, num_left))
        if not request.opening.done():
            return False
        request.constraint = _opened(request.opening.result)
        return True

    def _compiling(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A grammar that is compiled, or will be. Those used least recently make room for a new one."""
        future = self._compiled.get(spec)
        if future is None:
            while len(self._compiled) >= self._max_cached and next(iter(self._compiled.values())).done():
                self._compiled.popitem(last=False)
            future = self._compiled[spec] = self._submit(lambda: self._compile(spec))
        self._compiled.move_to_end(spec)
        return future

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._announce())
        return future

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            return self._compile_grammar(spec)
        except QuireError:
            raise
        except Exception as error:  # whatever a compiler raises, it is about this grammar and ends its requests alone
            raise InvalidRequestError(f"{spec.param}: it cannot be compiled ({error}).", spec.param) from error

    def _announce(self) -> None:
        self.version = next(self._versions)
        self._on_ready()


def _opened(open_it: Callable[[], Any]) -> Any:
    """What a matcher raises belongs to the request that it was opened for, and to nobody else."""
    try:
        return open_it()
    except QuireError:
        raise
    except Exception as error:
        raise EngineError(f"The grammar failed when it was opened ({type(error).__name__}: {error}).") from error
