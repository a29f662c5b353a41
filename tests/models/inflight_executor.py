"""A rank whose results are read as late as the engine asks for them, and graphs that any device can replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import SchedulerOutput
from quire.workers.cpu_graphs import CpuGraphBackend
from quire.workers.decode_graphs import End, Replay, Started
from quire.workers.launched_step import LaunchedStep
from quire.workers.parallel import ParallelContext
from quire.workers.prompt_graph import Record
from quire.workers.rest_graphs import RestGraphs
from quire.workers.worker import Worker


class RepeatedCalls:
    """What a graph does, by calling the function again: it finds its inputs where the first call did, or nowhere."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        self.num_captured += 1

        def replay() -> Started:
            self.num_replays += 1
            return Started(False, run)

        return replay


class CountedRecord:
    def __init__(self, record: Record, replayed: list[int]) -> None:
        self.least_rows, self.most_rows = record.least_rows, record.most_rows
        self._record, self._replayed = record, replayed

    def replay(self, num_rows: int) -> tuple[Tensor, ...]:
        self._replayed.append(num_rows)
        return self._record.replay(num_rows)


class CountedBackend(CpuGraphBackend):
    """Counts how often its graphs are used: those of decode steps, and what follows the attention of others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captured = self.num_replays = 0
        self.rests_captured: list[tuple[int, End]] = []  # of so many tokens
        self.num_rests_replayed = 0
        self.prompts_recorded_with: list[int] = []  # tokens
        self.prompts_replayed: list[int] = []

    def capture_any_rows(
        self, run: Callable[[], tuple[Tensor, ...]], num_rows: int, most_rows: int, inputs: Sequence[Tensor]
    ) -> tuple[Record, tuple[Tensor, ...]] | None:
        captured = super().capture_any_rows(run, num_rows, most_rows, inputs)
        if captured is None:
            return None
        record, result = captured
        self.prompts_recorded_with.append(num_rows)
        return CountedRecord(record, self.prompts_replayed), result

    def capture(self, run: Callable[[], None]) -> Replay | None:
        assert isinstance(run, partial)
        replay = super().capture(run)
        if replay is None:
            return None
        forward, size, end = run.args
        is_rest = isinstance(forward.__self__, RestGraphs)
        if is_rest:
            self.rests_captured.append((size, end))
        else:
            self.num_captured += 1

        def counted() -> Started:
            if is_rest:
                self.num_rests_replayed += 1
            else:
                self.num_replays += 1
            return replay()

        return counted


class InflightExecutor:
    """Launches each step when it is given, in the caller's thread. So with two steps in flight, a step is always
    launched before the result of the one before it was read, as on a GPU."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self._worker = Worker(config, info, ParallelContext())
        self._worker.load_model()
        self.graphs: RepeatedCalls | CountedBackend | None = None
        self.num_unread = 0  # most steps that were under way at a time

    def preferred_inflight_steps(self) -> int:
        return 2

    def preferred_speculative_tokens(self) -> int:
        return 0

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def available_kv_cache_bytes(self) -> list[int]:
        return [self._worker.available_kv_cache_bytes()]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._worker.initialize_kv_cache(config)
        self._launched: list[LaunchedStep] = []
        if isinstance(self.graphs, RepeatedCalls):
            self._worker.runner.capture_graphs(self.graphs)
        elif self.graphs is not None:
            self._worker.runner.record_graphs(self.graphs, most=12)

    def takes_next_step(self) -> bool:
        return True

    def execute(self, step: SchedulerOutput) -> LaunchedStep:
        self._launched = [each for each in self._launched if not each.is_known]
        self.num_unread = max(self.num_unread, 1 + len(self._launched))
        self._launched.append(self._worker.launch(step))
        return self._launched[-1]

    def restart(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass
