"""The engine's thread and the end of the process it runs in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
