"""What gateways and engines say to each other, and engines to their ranks. Framing is `transport.py`'s.

A gateway sends `Add` and `Abort`; an engine answers with a `StepOutputs` per step and connection, `Refused` for a
request that it does not take, a `LoadReport` now and then, and `Leaving` before it ends. A gateway that routes by
prefix sends `FollowCache`, and gets a `CacheSnapshot` and then a `CacheUpdate` per step. `Recall` and `Recalled` let a
client's stream go on that another gateway had. Ranks receive `SchedulerOutput` and answer with `RankAnswer`.
"""

from __future__ import annotations

import msgspec

from quire.engine.errors import EngineError, InvalidRequestError, OverloadedError, QuireError, TenantShareError
from quire.engine.outputs import (
    EngineOutput,
    EngineRequest,
    ModelRunnerOutput,
    ResumeTag,
    SchedulerOutput,
    SchedulerStats,
    wire_decoder,
    wire_encoder,
)

from .faults import Fault


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Run this request; its outputs go to the connection on which it came."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop working on these requests. Ids that are unknown or finished are ignored.

    With `report` the last output of each still comes: it says where the time went.
    """

    request_ids: list[str]
    report: bool = False


class FollowCache(msgspec.Struct, frozen=True, tag="follow_cache"):
    """Tell what the prefix cache holds: all of it now, and every change from now on."""


class Inject(msgspec.Struct, frozen=True, tag="inject"):
    """Do this to yourself (`chaos.py`). `rank` is meant where there are several, and the fault is one rank's."""

    fault: Fault
    rank: int = 0


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Tell what is remembered of the requests with this key (`ResumeTag`), and work on them no longer."""

    key: bytes


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one engine step produced for the streams of one gateway: all, or a part of what no frame could hold."""

    outputs: list[EngineOutput]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that the engine did not take, as the error that it raised."""

    request_id: str
    kind: str  # invalid | overloaded | share | failed
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0

    @classmethod
    def from_error(cls, request_id: str, error: QuireError) -> Refused:
        if isinstance(error, InvalidRequestError):
            return cls(request_id, "invalid", error.message, error.param, error.code)
        if isinstance(error, OverloadedError):
            kind = "share" if isinstance(error, TenantShareError) else "overloaded"
            return cls(request_id, kind, error.message, retry_after_s=error.retry_after_s)
        return cls(request_id, "failed", error.message)

    def to_error(self) -> QuireError:
        if self.kind == "invalid":
            return InvalidRequestError(self.message, self.param, self.code)
        if self.kind == "share":
            return TenantShareError(self.message, self.retry_after_s)
        if self.kind == "overloaded":
            return OverloadedError(self.message, self.retry_after_s)
        return EngineError(self.message)


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """An answer as far as an engine had it."""

    tag: ResumeTag
    seed: int
    token_ids: list[int]


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """The answer to `Recall`; without points where nothing is remembered."""

    key: bytes
    points: list[ResumePoint]


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """How busy an engine is. `problem` says why it makes no progress, None when it does.

    `num_gateways` are connected to it: every gateway is, so that is how many there are.
    """

    stats: SchedulerStats
    problem: str | None = None
    num_gateways: int = 1


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The engine ends soon. It works on until its streams are elsewhere, and takes new ones where nobody else is."""


class CacheSnapshot(msgspec.Struct, frozen=True, tag="cache"):
    """All blocks that an engine's prefix cache holds, after update `number`. Block numbers are packed as
    `prefix_keys.pack` does; `windows` as in `prefix_keys.CacheLayout`.
    """

    number: int
    block_size: int
    windows: tuple[int | None, ...]
    held: bytes


class CacheUpdate(msgspec.Struct, frozen=True, tag="cache_update"):
    """What a step changed. `number` is one more than that of the update before: otherwise one is missing."""

    number: int
    stored: bytes
    removed: bytes
    cleared: bool = False  # nothing is held that was held before


class RankAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to one step: the first of the last stage sends the output, the others that they have done it."""

    step_id: int
    output: ModelRunnerOutput | None = None
    error: str | None = None


GatewayMessage = Add | Abort | FollowCache | Recall | Inject
EngineMessage = StepOutputs | Refused | LoadReport | Recalled | Leaving | CacheSnapshot | CacheUpdate

encoder = wire_encoder()
# A union of types is no `type` to mypy, but it is one to msgspec.
gateway_message_decoder: msgspec.msgpack.Decoder[GatewayMessage] = wire_decoder(GatewayMessage)  # type: ignore[arg-type]
engine_message_decoder: msgspec.msgpack.Decoder[EngineMessage] = wire_decoder(EngineMessage)  # type: ignore[arg-type]
step_decoder = wire_decoder(SchedulerOutput)
rank_answer_decoder = wire_decoder(RankAnswer)
