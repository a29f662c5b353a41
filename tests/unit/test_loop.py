"""The end of an engine's thread, and of the process that it runs in, while a step is under way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from engine_helpers import make_core, make_request

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
