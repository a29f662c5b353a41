"""What GET /health tells: forward progress, engine by engine, and not that a process answers.

200 as long as one model can be served: a load balancer must not turn away from a service of which most works. `status`
says whether all of it does, and `quire status` fails when it does not. 503 otherwise, with OpenAI's error body besides.

A model that has been scaled to zero is `asleep`: nothing is wrong with it, and a request wakes it. The service is
asleep when all of its models are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from quire.engine.errors import OverloadedError

from .errors import body_of, status_of

Status = Literal["ok", "asleep", "degraded", "unhealthy"]


class EngineHealth(msgspec.Struct, frozen=True):
    """One engine. `problem` says why it makes no progress; None when it does."""

    id: str
    problem: str | None = None
    num_running: int = 0
    num_waiting: int = 0

    @property
    def status(self) -> Status:
        return "ok" if self.problem is None else "unhealthy"


class ModelHealth(msgspec.Struct, frozen=True):
    """The engines of one model. `fault` keeps all of them from being used: the gateway cannot load its tokenizer.
    `is_asleep`: there is no engine because none is wanted now."""

    id: str
    engines: Sequence[EngineHealth] = ()
    fault: str | None = None
    is_asleep: bool = False

    @property
    def status(self) -> Status:
        if self.is_asleep and self.fault is None and not self.engines:
            return "asleep"
        num_ok = sum(engine.problem is None for engine in self.engines)
        if self.fault is not None or num_ok == 0:
            return "unhealthy"
        return "ok" if num_ok == len(self.engines) else "degraded"

    @property
    def problem(self) -> str | None:
        """What is wrong with it; None when nothing is."""
        if self.fault is not None:
            return self.fault
        if not self.engines:
            return None if self.is_asleep else "No engine is connected."
        problems = [f"{engine.id}: {engine.problem}" for engine in self.engines if engine.problem is not None]
        if not problems:
            return None
        what = "No engine makes progress." if len(problems) == len(self.engines) else "An engine makes no progress."
        return f"{what} {'; '.join(problems)}"


class ServiceHealth(msgspec.Struct, frozen=True):
    """All models. `fault` concerns the gateway itself."""

    models: Sequence[ModelHealth]
    fault: str | None = None

    @property
    def status(self) -> Status:
        statuses = {model.status for model in self.models}
        if self.fault is not None or statuses == {"unhealthy"}:
            return "unhealthy"
        if statuses == {"asleep"}:
            return "asleep"
        return "ok" if statuses <= {"ok", "asleep"} else "degraded"

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line; None when nothing is."""
        if self.fault is not None:
            return self.fault
        problems = [(model.id, model.problem) for model in self.models if model.problem is not None]
        if len(self.models) == 1:
            return problems[0][1] if problems else None
        return " ".join(f"{name}: {problem}" for name, problem in problems) or None


def health_response(health: ServiceHealth) -> Response:
    payload: dict[str, Any] = {
        "status": health.status,
        "models": [_model(model) for model in health.models],
    }
    if health.status != "unhealthy":
        return Response(msgspec.json.encode(payload), media_type="application/json")
    error = OverloadedError(health.problem or "")
    payload |= msgspec.to_builtins(body_of(error))
    headers = {"retry-after": "1"}
    return Response(msgspec.json.encode(payload), status_of(error), headers, "application/json")


def _model(model: ModelHealth) -> dict[str, Any]:
    engines = [{"id": engine.id, "status": engine.status, **_load(engine)} for engine in model.engines]
    return {"id": model.id, "status": model.status, "problem": model.problem, "engines": engines}


def _load(engine: EngineHealth) -> dict[str, Any]:
    return {"problem": engine.problem, "num_running": engine.num_running, "num_waiting": engine.num_waiting}
