"""Steps as graphs on CPU: `kernels.cpu.graph` and `any_rows`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from quire.kernels.cpu import any_rows
from quire.kernels.cpu.graph import Pool, capture
from quire.kernels.cpu.recording import NotCapturableError

from .decode_graphs import Replay, Started

logger = logging.getLogger(__name__)

MOST_DECODES = 32  # with more, matrix products are large, and what lies between them hardly counts


class CpuGraphBackend:
    """Records a step while it is computed, so that a graph costs nothing until it saves something."""

    def __init__(self) -> None:
        self._pool = Pool()

    def capture(self, run: Callable[[], None]) -> Replay | None:
        try:
            graph = capture(run, self._pool)
        except NotCapturableError as reason:
            logger.info("decode steps, or what follows prompts, are not recorded: %s", reason)
            run()  # what was stored before is stored again; it has written no token that it reads
            return None

        def replay() -> Started:
            finish = graph.start()
            return Started(False, graph) if finish is None else Started(True, finish)

        return replay

    def capture_any_rows(
        self, run: Callable[[], tuple[Tensor, ...]], num_rows: int, most_rows: int, inputs: Sequence[Tensor]
    ) -> tuple[any_rows.AnyRows, tuple[Tensor, ...]] | None:
        try:
            return any_rows.capture(run, self._pool, num_rows, most_rows, inputs)
        except NotCapturableError as reason:
            logger.info("steps of prompts are not recorded by one of %d tokens: %s", num_rows, reason)
            return None
