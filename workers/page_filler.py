"""Gives a KV cache on the host its memory before requests come to need it, while nothing else is to be done.

The system hands memory out page by page, each when it is first touched. In a virtual machine that takes up to 10
microseconds a page, which is a fifth of the time to a first token. To touch all of a large cache at once would keep the
service from starting: a thread does it piece by piece in moments without a step, the blocks first that are used first.
It leaves a part of what was free, since others that start beside it were promised a share of the same memory.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from types import TracebackType

from torch import Tensor

from quire.engine.errors import ConfigError

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # Linux 5.14: MADV_POPULATE_WRITE, see madvise(2)
_PIECE_BYTES = 256 << 10  # at once: a step that comes now waits for so much
_LOOK_BYTES = 16 << 20  # after so many, see what is free
_IDLE_S = 0.05  # without a step; decode steps follow each other faster
_SHARE_LEFT = 0.25  # of what was free

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_process_ends = threading.Event()


@atexit.register
def _end_threads() -> None:
    """A thread that met the end of Python within torch's code would abort the process."""
    _process_ends.set()
    for thread in list(_threads):
        thread.join()


class PageFiller:
    """A context manager for steps: while one runs, and for `idle_s` after it, no further piece is begun.

    All tensors are filled from their starts, side by side, until one of them is gone or a quarter of what `free` said
    in bytes at the beginning is left. `ended` is then set.
    """

    def __init__(self, tensors: list[Tensor], free: Callable[[], int], idle_s: float = _IDLE_S) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._longest = max((tensor.nbytes for tensor in tensors), default=0)
        self._free = free
        self._idle_s = idle_s
        self._num_busy = 0
        self._idle_since = time.monotonic()
        self.ended = threading.Event()
        thread = threading.Thread(target=self._run, name="page filler", daemon=True)
        _threads.add(thread)
        thread.start()

    def __enter__(self) -> None:
        self._num_busy += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._idle_since = time.monotonic()
        self._num_busy -= 1

    def _run(self) -> None:
        started = time.monotonic()
        try:
            reason = self._fill() if sys.platform == "linux" else "only Linux can do that"
        except (OSError, ConfigError) as error:
            reason = str(error)
        finally:
            self.ended.set()
        if reason is None:
            logger.info("the KV cache is in memory, after %.1f s", time.monotonic() - started)
        else:
            logger.debug("the rest of the KV cache gets its memory when it is used: %s", reason)

    def _fill(self) -> str | None:
        """Returns why it did not fill all, if it did not."""
        left, until_look = self._free() * _SHARE_LEFT, 0
        for offset in range(0, self._longest, _PIECE_BYTES):
            for reference in self._tensors:
                if not self._wait_until_idle():
                    return "it is gone, or the process ends"
                if until_look <= 0:
                    if self._free() < left:
                        return "little is left"
                    until_look = _LOOK_BYTES
                tensor = reference()  # kept while it is touched
                if tensor is not None and offset < tensor.nbytes:
                    size = min(_PIECE_BYTES, tensor.nbytes - offset)
                    populate(tensor.data_ptr() + offset, size)
                    until_look -= size
                del tensor
        return None

    def _wait_until_idle(self) -> bool:
        """False when one of the tensors is gone, or the process ends."""
        while not _process_ends.is_set() and all(reference() is not None for reference in self._tensors):
            if self._num_busy == 0 and time.monotonic() - self._idle_since >= self._idle_s:
                return True
            time.sleep(self._idle_s)
        return False


@cache
def _madvise() -> Callable[..., int]:
    return ctypes.CDLL(None, use_errno=True).madvise


def populate(address: int, num_bytes: int) -> None:
    """Have the system give memory to these bytes, which keep what they hold. Raises `OSError` where it cannot."""
    start = address - address % mmap.PAGESIZE
    if _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(address + num_bytes - start), _POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "pages cannot be touched ahead")
