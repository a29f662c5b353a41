"""What a feature may say about a request's turn.

A feature that needs something before a request can run (a compiled grammar, a LoRA slot, keys and values from
elsewhere, room for an image) is a gate. The scheduler asks its gates in a fixed order when it is a request's turn,
and knows nothing else of them. Either every gate lets the request in and it gets its row and blocks, or whatever the
gates before had set aside is given back, and the request stands aside for the gate that refused it, without holding
up those behind it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from .errors import InvalidRequestError, QuireError
from .grammar.spec import GrammarSpec
from .request import Request
from .wait_ledger import WaitCause


class Gate(Protocol):
    """All calls come from the engine's thread, between two steps, and must not block."""

    cause: WaitCause

    @property
    def version(self) -> int:
        """Changes whenever a request that was refused might be let in; refused ones are not asked again before."""
        ...

    def enter(self, request: Request) -> bool:
        """Set aside what the request needs. False: not now, and nothing is set aside.

        Raises `QuireError` if it never will be: the request ends with that error.
        """
        ...

    def leave(self, request: Request) -> None:
        """Give back what `enter` set aside: the request is not admitted after all, or has left its row."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, grammar: GrammarSpec) -> object:
        """May take long; called from another thread. Raises `InvalidRequestError`."""
        ...


class GrammarGate:
    """Holds a request back until its grammar is compiled, off the hot path. Equal grammars are compiled once.

    `on_ready` is called from the compiling thread whenever a grammar is done. Compiled grammars are kept until there
    are more than `max_cached` of them; those under way are never given up.
    """

    cause = WaitCause.GRAMMAR

    def __init__(self, compiler: GrammarCompiler, on_ready: Callable[[], None], max_cached: int = 256) -> None:
        self.version = 0  # written by the compiling thread alone
        self._compiler = compiler
        self._on_ready = on_ready
        self._max_cached = max_cached
        self._compiled: OrderedDict[GrammarSpec, Future[object]] = OrderedDict()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def enter(self, request: Request) -> bool:
        grammar = request.source.grammar
        if grammar is None:
            return True
        future = self._compiled.get(grammar)
        if future is None:
            self._make_room()
            future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        if not future.done():
            return False
        future.result()  # a grammar that cannot be compiled ends the request
        return True

    def leave(self, request: Request) -> None:
        """A compiled grammar is shared and holds nothing of one request."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_room(self) -> None:
        """Forget the compiled grammars that were used least recently, down to one less than the limit."""
        done = [grammar for grammar, future in self._compiled.items() if future.done()]
        for grammar in done[: max(len(self._compiled) - self._max_cached + 1, 0)]:
            del self._compiled[grammar]

    def _compile(self, grammar: GrammarSpec) -> object:
        try:
            return self._compiler.compile(grammar)
        except QuireError:
            raise
        except Exception as error:  # whatever a compiler raises, it is about this grammar and ends its requests alone
            raise InvalidRequestError(f"grammar: it cannot be compiled ({error}).", "grammar") from error
        finally:
            with contextlib.suppress(RuntimeError):  # the gate was closed meanwhile
                self._threads.submit(self._announce)  # runs after this one is done, in the same thread

    def _announce(self) -> None:
        self.version += 1
        self._on_ready()
