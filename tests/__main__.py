"""`python -m tests`, which is `make test`: all tests, so that no core is idle while there is something to do.

    together    two processes   tests that take one core, or wait, and share no state between files
    in turn     one process     tests that start services, which take all cores, and wait for them: a quarter of it
    patient     two processes   tests that only compute, and that no clock is held against: beside the others, from the
                                start, when a core has nothing else to do (SCHED_IDLE); what is left of them, at the end

Exits with 1 if any has failed. `make test ARGS="tests/unit -x"` is pytest with these arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
TOGETHER = ["tests/unit", "tests/kernels", "tests/models", "tests/api", "tests/cluster"]
PATIENT = [
    "tests/unit/test_mutations.py",
    "tests/unit/test_random_workloads.py",
    "tests/kernels/test_other_cpus.py",
    "tests/kernels/test_triton_interpreted.py",
]
PATIENT_TIMEOUT_S = 1800  # of a test: others come first
# Files are given out in their order, so that short ones come last and both processes have something to do until the
# end. Each has as many threads as there are cores: those of torch that wait must not spin (`workers`), which would keep
# the other process from its work.
BY_TWO = ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


def main() -> int:
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, _end)
    testpaths = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    in_turn = [path for path in testpaths if path not in TOGETHER]
    no_spinning = os.environ | {"GOMP_SPINCOUNT": "0"}
    with tempfile.TemporaryFile("w+") as output:
        patient = subprocess.Popen(
            _pytest(*BY_TWO, "-p", "no:cacheprovider", "--timeout", str(PATIENT_TIMEOUT_S), *PATIENT),
            env=no_spinning,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_come_last,
        )
        try:
            others = [f"--ignore={path}" for path in PATIENT]
            failed = subprocess.run(_pytest(*BY_TWO, *TOGETHER, *others), env=no_spinning, check=False).returncode
            failed |= subprocess.run(_pytest(*in_turn), check=False).returncode
            print(f"Those that only compute: {' '.join(PATIENT)}", flush=True)
            failed |= patient.wait()
        finally:
            patient.terminate()
        output.seek(0)
        print(output.read(), end="", flush=True)
    return int(failed != 0)


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def _come_last() -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
