"""A step that the device is working on, and what will be known when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

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


class LaunchedStep:
    """The result of a step, from any thread: `result` waits for the device and not for what was launched later."""

    def __init__(self, copies: HostCopies, read: Callable[[], ModelRunnerOutput]) -> None:
        copies.seal()
        self._copies = copies
        self._read = read
        self._lock = threading.Lock()
        self._output: ModelRunnerOutput | None = None

    @property
    def is_known(self) -> bool:
        """Somebody has waited for the result: asking again costs nothing."""
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        """Raises `RuntimeError` where the device has failed."""
        with self._lock:
            if self._output is None:
                self._copies.wait()
                self._output = self._read()
            return self._output
