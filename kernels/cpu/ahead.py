"""Compiles on several cores what every engine needs, on a machine where nothing of it is on disk yet.

Numba compiles one function at a time in a process, for some 15 s the first time on a machine, and keeps it on disk for
all of them. So attention, which is half of it, is compiled in other processes while this one loads the model:

    this process   the model, products, norms, sampling, ...   |  has all of it
    others         attention of decodes | attention of prompts |

They end with what they were started for; where that is killed, when they have compiled. What they fail to do, this
process does itself when it needs it; so it does where norms are on disk and attention is not: with the second type of
numbers that is served on a machine, or after a first start that was interrupted.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import decode, elementwise, likeliest, operators, prompt_tiles, prompts, sampling, tokens

logger = logging.getLogger(__name__)

_PATIENCE_S = 120.0  # for other processes; they take 10 s
_done: set[tuple[torch.dtype, torch.dtype]] = set()  # by this process


def _prompts(query: torch.dtype, keys: torch.dtype) -> None:
    """The fastest for them; what has a cap or sinks is compiled when it is met."""
    if prompt_tiles.IS_FAST and query == torch.bfloat16:
        prompt_tiles.worker()
    else:
        prompts.worker(query, keys)


def _decodes(query: torch.dtype, keys: torch.dtype) -> None:
    """Likewise; with a window, a cap or sinks it may be another one, which is compiled when it is met."""
    beside_tiles = prompt_tiles.IS_FAST and query == torch.bfloat16
    decode.worker(query, keys, decode.way_beside_tiles(None) if beside_tiles else "vectors")


_FUNCTIONS = tuple(
    each for some in (elementwise, sampling, operators, likeliest, tokens, decode) for each in some.FUNCTIONS
)
_PARTS: dict[str, Callable[[torch.dtype, torch.dtype], object]] = {"decode": _decodes, "prompts": _prompts}


@contextmanager
def compiled_meanwhile(query: torch.dtype, keys: torch.dtype) -> Iterator[bool]:
    """What is compiled while the block runs, and right behind it; whether other processes compile. `query` and `keys`
    are the types of queries and of KV caches."""
    helpers: list[subprocess.Popen[str]] = []
    try:
        if _is_new(query, keys):
            num_helpers = min(torch.get_num_threads() - 1, len(_PARTS))
            for i in range(num_helpers):
                helpers += _start(list(_PARTS)[i::num_helpers], query, keys)
        yield bool(helpers)
        for function in _FUNCTIONS:
            function.compile()
        deadline = time.monotonic() + _PATIENCE_S
        for helper in helpers:
            _wait_for(helper, deadline)
    finally:
        for helper in helpers:
            if helper.returncode is None:
                helper.kill()
                helper.communicate()
    _done.add((query, keys))


def _is_new(query: torch.dtype, keys: torch.dtype) -> bool:
    """Whether their attention is compiled here, and nothing was on disk when the first function was asked for."""
    return query in decode.DTYPES and (query, keys) not in _done and not _FUNCTIONS[0].compile()


def _start(parts: list[str], query: torch.dtype, keys: torch.dtype) -> list[subprocess.Popen[str]]:
    """One process, or none where the system has no room for it."""
    names = (str(dtype).removeprefix("torch.") for dtype in (query, keys))
    try:
        helper = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *names, *parts],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        logger.info("Kernels are compiled one after the other, as no process for them can be started: %s", error)
        return []
    return [helper]


def _wait_for(helper: subprocess.Popen[str], deadline: float) -> None:
    try:
        _, said = helper.communicate(timeout=max(0.0, deadline - time.monotonic()))
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
