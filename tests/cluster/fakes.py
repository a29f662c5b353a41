"""Stand-ins for cluster tests: a dictionary as the key-value store, and engines whose model is made of hashes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))

from engine_helpers import make_core
from fake_executor import FakeExecutor, expected_tokens, pooled, prompt_logprobs_of, states_of

from quire.cluster.directory import Directory, EngineRecord
from quire.cluster.engine_server import EngineServer
from quire.engine.config import ParallelConfig
from quire.engine.core import EngineCore
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput

__all__ = [
    "DictStore",
    "FakeExecutor",
    "PacedExecutor",
    "expected_tokens",
    "fake_core",
    "make_core",
    "pooled",
    "prompt_logprobs_of",
    "start_engine",
    "states_of",
    "until",
]

MODEL = "fake"
HOST = "127.0.0.1"


class DictStore:
    """The key-value store of one process."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, key: str, value: bytes, *, overwrite: bool) -> None:
        if overwrite or key not in self.data:
            self.data[key] = value

    def get(self, key: str) -> bytes | None:
        return self.data.get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.data if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self.data.pop(key, None)


class PacedExecutor(FakeExecutor):
    """A step takes `step_s` seconds, so that streams last long enough for something to happen to them."""

    def __init__(self, step_s: float = 0.0, num_blocks: int = 256) -> None:
        super().__init__(num_blocks=num_blocks)
        self.step_s = step_s

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        time.sleep(self.step_s)
        return super().execute(step)


def fake_core(step_s: float = 0.0, *, max_model_len: int = 800, **scheduler: object) -> EngineCore:
    return make_core(PacedExecutor(step_s), max_model_len=max_model_len, **{"max_num_seqs": 32, **scheduler})


async def start_engine(
    directory: Directory, engine_id: str, core: EngineCore | None = None, *, model: str = MODEL
) -> EngineServer:
    """An engine on a fake core, listening and registered."""
    core = core or fake_core()
    server = EngineServer(core, engine_id, directory.secret(), ParallelConfig(step_timeout_s=5.0))
    port = await server.start(HOST)
    directory.register(
        EngineRecord(engine_id=engine_id, model=model, host=HOST, port=port, max_model_len=core.max_model_len)
    )
    return server


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
