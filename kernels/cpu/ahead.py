"""On several cores, what is compiled for every engine, where nothing of it is on disk yet.

Numba compiles one function at a time in a process, for some 15 s the first time on a machine, and keeps it on disk for
all of them. So attention, which is half of it, is compiled in other processes while this one loads the model:

    this process   the model, norms, rotations, sampling, ...  |  has all of it
    others         attention of decodes | attention of prompts |

They end with what they were started for. What they fail to do, this process does itself when it needs it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import decode, elementwise, operators, prompt_tiles, prompts, sampling

logger = logging.getLogger(__name__)

_PATIENCE_S = 120.0  # for another process; it takes 10 s


def _prompts(query: torch.dtype, keys: torch.dtype) -> None:
    """The fastest for them; what has a cap or sinks is compiled when it is met."""
    if prompt_tiles.IS_FAST and query == torch.bfloat16:
        prompt_tiles.worker()
    else:
        prompts.worker(query, keys)


_PARTS: dict[str, Callable[[torch.dtype, torch.dtype], object]] = {"decode": decode.worker, "prompts": _prompts}


@contextmanager
def compiled_meanwhile(query: torch.dtype, keys: torch.dtype) -> Iterator[None]:
    """Until the block ends, and with it. `query` and `keys` are the types of queries and of KV caches."""
    is_known = query in decode.DTYPES
    if not is_known or elementwise.FUNCTIONS[0].compile():
        yield
        return
    num_helpers = min(torch.get_num_threads() - 1, len(_PARTS))
    helpers = [_start(list(_PARTS)[i::num_helpers], query, keys) for i in range(num_helpers)]
    try:
        yield
        for function in (*elementwise.FUNCTIONS, *sampling.FUNCTIONS, *operators.FUNCTIONS):
            function.compile()
    except BaseException:
        for helper in helpers:
            helper.kill()
            helper.communicate()
        raise
    for helper in helpers:
        _wait_for(helper)


def _start(parts: list[str], query: torch.dtype, keys: torch.dtype) -> subprocess.Popen[str]:
    names = (str(dtype).removeprefix("torch.") for dtype in (query, keys))
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *names, *parts],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(helper: subprocess.Popen[str]) -> None:
    try:
        _, said = helper.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        helper.kill()
        _, said = helper.communicate()
    if helper.returncode != 0:
        logger.info("Kernels are compiled one after the other, as a process for them failed: %s", said[-500:])


def main() -> None:
    """`python -m quire.kernels.cpu.ahead float32 float32 decode prompts`."""
    query, keys = (getattr(torch, name) for name in sys.argv[1:3])
    for part in sys.argv[3:]:
        _PARTS[part](query, keys)


if __name__ == "__main__":
    main()
