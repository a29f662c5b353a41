"""Gives a KV cache on the host its memory before requests come to need it, while nothing else is to be done.

The system hands memory out page by page, each when it is first touched. In a virtual machine that takes up to 10
microseconds a page, which is a fifth of the time to a first token. To touch all of a large cache at once would keep the
service from starting: a thread does it piece by piece in moments without a step, the blocks first that are used first.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from torch import Tensor

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # Linux 5.14: MADV_POPULATE_WRITE, see madvise(2)
_PIECE_BYTES = 256 << 10  # at once: a step that comes now waits for so much
_IDLE_S = 0.05  # without a step; decode steps follow each other faster


class PageFiller:
    """A context manager for steps: while one runs, and for `idle_s` after it, no further piece is begun.

    All tensors are filled from their starts, side by side. Call `stop` before they are freed.
    """

    def __init__(self, tensors: list[Tensor], idle_s: float = _IDLE_S) -> None:
        self._spans = sorted({(tensor.data_ptr(), tensor.nbytes) for tensor in tensors})
        self._idle_s = idle_s
        self._num_busy = 0
        self._free_since = time.monotonic()
        self._stopped = threading.Event()
        self.finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page filler", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._num_busy += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._free_since = time.monotonic()
        self._num_busy -= 1

    def stop(self) -> None:
        """Returns when the memory is not touched any more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            self._fill(ctypes.CDLL(None, use_errno=True).madvise)
        self.finished.set()

    def _fill(self, madvise: Callable[..., int]) -> None:
        started = time.monotonic()
        longest = max((size for _, size in self._spans), default=0)
        for offset in range(0, longest, _PIECE_BYTES):
            for address, size in self._spans:
                first = address + offset
                last = address + min(size, offset + _PIECE_BYTES)
                first -= first % mmap.PAGESIZE
                if first >= last:
                    continue
                if not self._wait_until_idle():
                    return
                if madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _POPULATE_WRITE) != 0:
                    logger.debug("pages are not touched ahead: error %d", ctypes.get_errno())
                    return
        total = sum(size for _, size in self._spans)
        logger.info("all %d bytes of the KV cache are in memory, after %.1f s", total, time.monotonic() - started)

    def _wait_until_idle(self) -> bool:
        """False when the filler is to stop."""
        while not self._stopped.is_set():
            if self._num_busy == 0 and time.monotonic() - self._free_since >= self._idle_s:
                return True
            self._stopped.wait(self._idle_s)
        return False
