"""SIGINT waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from quire.engine.interrupts import interrupts_afterwards


@pytest.fixture(autouse=True)
def _python_handles_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_waits() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - what is done before it is raised is the point
        with interrupts_afterwards():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("what follows")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_do_not() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_afterwards():  # noqa: PT012 - likewise
        signal.raise_signal(signal.SIGINT)
        done.append("a part")
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["a part"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_and_an_interrupt() -> None:
    with pytest.raises(ValueError, match="of the step"), interrupts_afterwards():
        raise ValueError("of the step")
    with pytest.raises(KeyboardInterrupt), interrupts_afterwards():  # noqa: PT012 - both in one step
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the step")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_ignored_signals_stay_as_they_are() -> None:
    entered = []

    def enter() -> None:
        with interrupts_afterwards():
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter()
    assert entered == [signal.default_int_handler, signal.SIG_IGN]
