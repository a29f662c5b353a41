"""Where the time of the hot loop goes, as text: `python -m tests.benchmarks.hot_loop -- --quantization int8`.

Samples `quire bench offline` with py-spy (from the development environment) and shows which of Quire's functions
were at work in steps, by share of the samples: in itself, with what it calls outside of Quire (torch, compiled
kernels), and in all. The first steps compile kernels, so that answers should be long.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OURS = "quire/"
STEP = "step (quire/engine/core.py"  # a sample without it is no part of a step


@dataclass(slots=True)
class Profile:
    """Samples of steps, by function of Quire. `deepest`: it was the last of ours on the stack."""

    num_samples: int = 0
    deepest: Counter[str] = field(default_factory=Counter)
    anywhere: Counter[str] = field(default_factory=Counter)


def read(stacks: Iterable[str]) -> Profile:
    """From py-spy's raw format: frames with semicolons between, a space, the number of samples."""
    profile = Profile()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not any(STEP in frame for frame in frames):
            continue
        ours = [frame.rpartition(":")[0] for frame in frames if OURS in frame]  # without the line's number
        profile.num_samples += int(count)
        profile.deepest[ours[-1]] += int(count)
        for function in set(ours):
            profile.anywhere[function] += int(count)
    return profile


def markdown(profile: Profile, num_rows: int) -> str:
    lines = [f"{profile.num_samples} samples of steps", "", "| function | itself and torch | in all |", "|---|---|---|"]
    for function, count in profile.deepest.most_common(num_rows):
        share, whole = count / profile.num_samples, profile.anywhere[function] / profile.num_samples
        lines.append(f"| `{function})` | {share:.1%} | {whole:.1%} |")
    return "\n".join(lines)


def sample(options: Sequence[str], rate: int) -> Profile:
    """Run `quire bench offline` with these options under py-spy. Raises `CalledProcessError` where either fails."""
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--format", "raw", "--threads"]
        command = [sys.executable, "-m", "quire", "bench", "offline", *options]
        subprocess.run(
            [*spy, "--rate", str(rate), "--output", str(stacks), "--", *command],
            check=True,
            stdout=sys.stderr,
        )
        return read(stacks.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hot_loop", description=__doc__)
    parser.add_argument("--rate", type=int, default=100, help="samples per second")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("options", nargs="*", help="for quire bench offline, after --")
    args = parser.parse_args()
    options = args.options or ["--num-prompts", "8", "--output-len", "256", "--max-model-len", "2048"]
    print(markdown(sample(options, args.rate), args.rows))


if __name__ == "__main__":
    main()
