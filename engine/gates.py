"""What a feature may say about a request's turn.

A feature that needs something before a request can run (a compiled grammar, a LoRA slot, keys and values from
elsewhere, room for an image) is a gate. The scheduler asks its gates in a fixed order when it is a request's turn,
and knows nothing else of them. Either every gate lets the request in and it gets its row and blocks, or whatever the
gates before had set aside is given back, and the request stands aside for the gate that refused it, without holding
up those behind it.
"""

from __future__ import annotations

from typing import Protocol

from .request import Request
from .wait_ledger import WaitCause


class Gate(Protocol):
    """All calls come from the engine's thread, between two steps, and must not block."""

    cause: WaitCause

    @property
    def version(self) -> int:
        """Changes whenever a request that was refused might be let in; nobody is asked again before."""
        ...

    def enter(self, request: Request) -> bool:
        """Set aside what the request needs. False: not now, and nothing is set aside.

        Raises `QuireError` if it never will be: the request ends with that error.
        """
        ...

    def may_enter(self, request: Request) -> bool:
        """Of a request that was refused, after `version` has changed: whether it is worth asking `enter` again."""
        ...

    def leave(self, request: Request) -> None:
        """Give back what `enter` set aside: the request is not admitted after all, or has left its row."""
        ...

    def close(self) -> None:
        """The engine ends: nothing is asked any more."""
        ...
