"""A step that the device is working on, and what will be known when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quire.engine.outputs import ModelRunnerOutput


class HostCopies:
    """Copies from the device to the host that nobody waits for until their numbers are needed. Belongs to one step."""

    def __init__(self, device: torch.device) -> None:
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, tensor: Tensor, *, is_reused: bool = False) -> Tensor:
        """A tensor on the host that has the same numbers as soon as `wait` returns.

        On CPU it is `tensor` itself, unless that `is_reused`: what is launched later writes to it.
        """
        if self._done is None:
            return tensor.clone() if is_reused else tensor
        # Page-locked memory comes from torch's cache of it, and goes back there.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def seal(self) -> None:
        """All copies have been started."""
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


Read = Callable[[], ModelRunnerOutput]


class StepWork:
    """What the host does for a step, in the order of steps: it begins when this is made, and goes on when `end` is
    called. In between, a device or other threads compute, and the host may do something else.
    """

    def __init__(self, work: Generator[bool, None, Read]) -> None:
        """`work` says at its only stop whether it is computed meanwhile, so that the next step should be planned; it
        gives in the end what reads the result."""
        self._work = work
        self._read: Read | None = None
        self._error: str | None = None
        self._lock = threading.Lock()
        self.is_under_way = next(work)

    def end(self) -> Read:
        """Once, whoever calls it and however often. Raises what the rest of the work raised, the first time; then a
        `RuntimeError` that says so, for that keeps nothing alive that the work has used."""
        with self._lock:
            if self._error is not None:
                raise RuntimeError(self._error)
            while self._read is None:
                try:
                    with torch.inference_mode():
                        next(self._work)
                except StopIteration as ended:
                    self._read, self.is_under_way = ended.value, True
                except BaseException as error:
                    self._error = f"{type(error).__name__}: {error}"
                    raise
            return self._read

    def drop(self) -> None:
        """Nobody wants the result. Nothing is computed any more when this returns, but what another thread is just
        waiting for."""
        if self._lock.acquire(blocking=False):
            self._error = "the step was given up"
            try:
                self._work.close()
            finally:
                self._lock.release()


class LaunchedStep:
    """The result of a step, from any thread: `result` waits for the device and not for what was launched later."""

    def __init__(self, copies: HostCopies, work: StepWork, busy: AbstractContextManager[object]) -> None:
        """`busy` is entered while the rest of the work is done."""
        copies.seal()
        self._copies = copies
        self._work = work
        self._busy = busy
        self._lock = threading.Lock()
        self._output: ModelRunnerOutput | None = None

    @property
    def is_under_way(self) -> bool:
        """It is computed whether somebody waits for it or not."""
        return self._work.is_under_way

    @property
    def is_known(self) -> bool:
        """Somebody has waited for the result: asking again costs nothing."""
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        """Raises `RuntimeError` where the device has failed."""
        with self._lock:
            if self._output is None:
                with self._busy:
                    read = self._work.end()
                self._copies.wait()
                self._output = read()
            return self._output
