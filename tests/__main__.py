"""`python -m tests`, which is `make test`: all tests, so that no core is idle while there is something to do.

    together    two processes   tests that take one core, or wait, and share no state between files
    in turn     one process     tests that start services, which take all cores, and leave a quarter of their time idle
    patient     two processes   tests that only compute, and that no clock is held against: from the start, beside the
                                others, when a core has nothing else to do (SCHED_IDLE)

What the patient ones print comes when they are done and the others are not in the middle of something. Exits with 1 if
any has failed. `make test ARGS="tests/unit -x"` is pytest with these arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
TOGETHER = ["tests/unit", "tests/kernels", "tests/models", "tests/api", "tests/cluster"]
PATIENT = [
    "tests/unit/test_mutations.py",
    "tests/unit/test_random_workloads.py",
    "tests/kernels/test_other_cpus.py",
    "tests/kernels/test_triton_interpreted.py",
]
PATIENT_TIMEOUT_S = 3600  # of a test: others come first
END_S = 60  # that pytest has for its fixtures after an interruption
# Files are given out in their order, so that short ones come last and both processes have something to do until the
# end. Each has as many threads as there are cores: those of torch that wait must not spin (`workers`), which would keep
# the other process from its work.
BY_TWO = ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


class Part:
    """pytest with some arguments, in a process group of its own: an interruption is told to it once."""

    def __init__(self, *arguments: str, spins: bool = False, output: int | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            env=os.environ if spins else os.environ | {"GOMP_SPINCOUNT": "0"},
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            process_group=0,
        )

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        """0 if all tests have passed."""
        return self._process.wait()

    def come_last(self) -> None:
        """Its processes, those to come too, have a core when nobody else wants it."""
        pid = self._process.pid
        try:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        except (AttributeError, OSError):  # not Linux, or a sandbox
            os.setpriority(os.PRIO_PROCESS, pid, 19)

    def interrupt(self) -> None:
        """pytest ends what its fixtures have started, and tells what has failed so far."""
        if not self.is_done:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Wait for that, not for ever."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def main() -> int:
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would pytest
    testpaths = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    in_turn = [path for path in testpaths if path not in TOGETHER]
    together = [*TOGETHER, *(f"--ignore={path}" for path in PATIENT)]
    with tempfile.NamedTemporaryFile() as output, open(output.name) as printed:
        patience = ["-p", "no:cacheprovider", "--timeout", str(PATIENT_TIMEOUT_S)]
        parts = [Part(*BY_TWO, *patience, *PATIENT, output=output.fileno())]
        parts[0].come_last()
        try:
            for arguments, spins in (([*BY_TWO, *together], False), (in_turn, True)):
                parts.append(Part(*arguments, spins=spins))
                parts[-1].wait()
                if parts[0].is_done:
                    _show(printed)
            if not parts[0].is_done:
                print(f"Still at work: {' '.join(PATIENT)}", flush=True)
            exits = [part.wait() for part in parts]
            return int(any(exits))
        except KeyboardInterrupt:
            return 130
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # a second one would leave the others to themselves
            for part in parts:
                part.interrupt()
            for part in parts:
                part.end()
            _show(printed)


def _show(output: IO[str]) -> None:
    """What was written since this was last called."""
    print(output.read(), end="", flush=True)


def _leave(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
