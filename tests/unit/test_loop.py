"""What an engine's thread is asked between steps; its end, and that of its process, while a step is under way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engine_helpers import make_core, make_request

from quire.engine.core import EngineCore
from quire.engine.errors import EngineEndedError, QuireError
from quire.engine.loop import EngineLoop

# The main thread ends while a step is under way, which takes half a second more.
SCRIPT = """
import threading
import time

from engine_helpers import make_core, make_request
from quire.engine.loop import EngineLoop

core = make_core()
planned, under_way = core.step, threading.Event()


def step():
    under_way.set()
    threading.main_thread().join()
    time.sleep(0.5)
    print("the step ended", flush=True)
    return planned()


core.step = step
loop = EngineLoop(core, lambda outputs: print(len(outputs), "output", flush=True), print)
loop.start()
loop.add(make_request("a", [1, 2, 3], 5))
under_way.wait()
"""


def test_the_process_ends_after_the_step_under_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the step ended\n1 output\n", "")


def test_a_step_that_is_given_up_is_no_failure() -> None:
    core = make_core()
    under_way, is_shut_down = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def step() -> list[object]:
        under_way.set()
        is_shut_down.wait(30)
        raise RuntimeError("the model has gone")

    core.step = step  # type: ignore[method-assign,assignment]
    core.shutdown = is_shut_down.set  # type: ignore[method-assign]
    loop = EngineLoop(core, lambda _outputs: None, failures.append)
    loop.start()
    loop.add(make_request("a", [1, 2, 3], 5))
    assert under_way.wait(30)
    loop.stop(timeout_s=0.01)
    loop._thread.join(30)
    assert not loop.is_alive
    assert failures == []


def test_a_call_that_is_cancelled_is_not_made() -> None:
    """Its turn may come, or the loop may end, before whoever asked says so: neither is an error of the loop."""
    failures: list[BaseException] = []
    loop = EngineLoop(make_core(), lambda _outputs: None, failures.append)
    begun, released = threading.Event(), threading.Event()

    def wait(_core: EngineCore) -> str:
        begun.set()
        assert released.wait(30)
        return "done"

    loop.start()
    waiting = loop.call(wait)
    assert begun.wait(30)
    assert not waiting.cancel()  # it is being made
    calls: list[str] = []
    cancelled = loop.call(lambda _core: calls.append("cancelled"))
    assert cancelled.cancel()
    released.set()
    assert waiting.result(30) == "done"
    assert loop.call(lambda _core: "next").result(30) == "next"
    assert calls == []

    begun.clear()
    released.clear()
    last = loop.call(wait)
    assert begun.wait(30)
    loop._put(None)
    kept, given_up = loop.call(lambda _core: calls.append("kept")), loop.call(lambda _core: calls.append("given up"))
    assert given_up.cancel()
    released.set()
    assert last.result(30) == "done"
    with pytest.raises(EngineEndedError):
        kept.result(30)
    loop.stop()
    assert (calls, failures, loop.is_alive) == ([], [], False)
    with pytest.raises(EngineEndedError):
        loop.call(lambda _core: None).result(30)


@pytest.mark.parametrize(("error", "ends"), [(QuireError("no"), False), (RuntimeError("broken"), True)])
def test_a_call_that_fails_tells_whoever_waits(error: Exception, ends: bool) -> None:
    failures: list[BaseException] = []
    loop = EngineLoop(make_core(), lambda _outputs: None, failures.append)
    loop.start()

    def fail(_core: EngineCore) -> None:
        raise error

    assert loop.call(fail).exception(30) is error
    if ends:
        loop._thread.join(30)
    assert loop.is_alive != ends
    loop.stop()
    assert failures == ([error] if ends else [])
