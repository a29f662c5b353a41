"""How long `quire serve` takes until it serves, by phase: `python -m tests.benchmarks.start`.

The first start compiles kernels, into a folder of its own; those after it find them there.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.cluster.bench.machine import describe_machine

from .peers.servers import POLL_S, quire_server, running

_ANNOUNCED = re.compile(r" after ([\d.]+) s \((.*)\)")
_PHASE = re.compile(r"(\D+) ([\d.]+) s")


def read(log: str) -> dict[str, float]:
    """Seconds until it serves, and of them those of each phase, from what `quire serve` says. Raises `ValueError`."""
    found = _ANNOUNCED.search(log)
    if found is None:
        raise ValueError("the service did not say how long its start took")
    phases = {name: float(seconds) for name, seconds in _PHASE.findall(found[2].replace(" · ", ""))}
    return {"all": float(found[1]), **phases}


def wait_for_phases(log: Path, timeout_s: float = 120.0) -> dict[str, float]:
    """As `read`, once they are there. Raises `ValueError` with the end of the log when they do not come."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if _ANNOUNCED.search(log.read_text(errors="replace")):
            return read(log.read_text(errors="replace"))
        time.sleep(POLL_S)
    raise ValueError(f"the service does not serve after {timeout_s:g} s:\n{log.read_text(errors='replace')[-2000:]}")


def markdown(starts: Sequence[dict[str, float]]) -> str:
    names = list(starts[0])
    lines = [f"| start | {', s | '.join(names)}, s |", f"|{'---|' * (len(names) + 1)}"]
    for number, start in enumerate(starts):
        kind = "kernels are compiled" if number == 0 else "kernels are there"
        lines.append(f"| {kind} | {' | '.join(f'{start[name]:.1f}' for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start", description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args()
    starts = []
    with tempfile.TemporaryDirectory(prefix="quire-start-") as name:
        folder = Path(name)
        # Not asked whether it is ready, which is work: it says so itself.
        environment = {"NUMBA_CACHE_DIR": str(folder / "kernels")}
        server = replace(quire_server("float32"), ready_path="/health", environment=environment)
        for number in range(args.starts):
            log = folder / f"{number}.log"
            with running(server, log):
                starts.append(wait_for_phases(log))
    print(" · ".join(f"{name} {value}" for name, value in describe_machine().items()), end="; float32\n\n")
    print(markdown(starts))


if __name__ == "__main__":
    main()
