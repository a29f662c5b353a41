"""The configuration of a service: `QuireConfig`, which Ray Serve config files hold as `args:` (`config_file.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from quire.engine.config import EngineConfig, Section
from quire.engine.errors import ConfigError

from .router import PolicyName

IMPORT_PATH = "quire.cluster.app:build"
GATEWAY, ENGINE = "Gateway", "Engine"
# For `grpc_options: {port: …, grpc_servicer_functions: […]}`: with it, Serve opens a gRPC port for the gateways.
GRPC_SERVICER = "quire.cluster.grpc.quire_inference_pb2_grpc.add_InferenceServicer_to_server"


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[a-z0-9.\-\[\]:]+)$")]


class ApiConfig(Section):
    """What the HTTP API allows, and how long it waits."""

    failover_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that a request waits while there is no engine, before it is refused or fails."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest body of an HTTP request.")
    request_templates: bool = Field(
        True, description="Whether a request may bring its own chat_template, which is rendered in a sandboxed process."
    )
    max_tokenize_chars: int = Field(
        1 << 20, ge=1024, description="Longest text of /tokenize, in characters, whether or not it fits the context."
    )
    max_choices: int = Field(256, ge=1, description="Most answers to one HTTP request (prompts x n).")
    max_inputs: int = Field(2048, ge=1, description="Most inputs of one request for embeddings.")
    max_messages: int = Field(4096, ge=1, le=32768, description="Most messages of one conversation.")
    max_stop_strings: int = Field(16, ge=1, le=16, description="Most stop strings of one request.")
    max_logit_bias: int = Field(300, ge=1, le=300, description="Most entries of a request's logit_bias.")
    keys_file: Path | None = Field(
        None,
        description="File of API keys and tenants (YAML or JSON, on every node). When not given, nobody needs a key.",
    )
    open_metrics: bool = Field(True, description="Whether /metrics answers without an API key.")
    allowed_origins: list[Origin] = Field(
        [],
        description="Web pages of these origins (https://chat.example; '*' for all) may use the service in a browser.",
    )


class RoutingConfig(Section):
    """How a gateway chooses among the engines of a model."""

    policy: PolicyName = Field(
        "prefix_affinity",
        description="prefix_affinity weighs how much of a prompt an engine has in its cache against its load; "
        "least_loaded, power_of_two and round_robin do not look at prompts.",
    )
    max_waiting_requests: int = Field(
        1024,
        ge=1,
        description="Most requests of one gateway that wait while there is no engine; more are refused with 503.",
    )


class QuireConfig(EngineConfig):
    """What `args:` of a config file holds: the sections of one engine, or `models:` with those of each; `api` and
    `routing`.

    With `models:`, sections next to it hold for every model that does not say otherwise.
    """

    models: tuple[EngineConfig, ...] = Field(
        (), min_length=1, description="Models served together, the default one first; each has engines of its own."
    )
    api: ApiConfig = ApiConfig()
    routing: RoutingConfig = RoutingConfig()
    allow_faults: bool = Field(
        False, description="Whether `quire chaos` may kill and stop processes of this service. For trials only."
    )

    @field_validator("models", mode="before")
    @classmethod
    def _with_shared_settings(cls, entries: Any, info: ValidationInfo) -> Any:
        """Each entry with what stands next to `models:`. A model's name alone is short for `model: NAME`."""
        if not isinstance(entries, list | tuple):
            return entries
        shared = {key: value for key, value in info.data.items() if key in EngineConfig.model_fields}
        named = shared["model"].model_fields_set & {"model", "served_model_name"} if "model" in shared else ()
        if named:
            raise ValueError(f"names the models; {', '.join(sorted(named))} next to it names another one")
        return [_merged(shared, entry) for entry in entries]

    @field_validator("models")
    @classmethod
    def _told_apart(cls, models: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
        for i, engine in enumerate(models):
            for other in models[:i]:
                if _deployment_name(engine) == _deployment_name(other):
                    raise ValueError(
                        f"two models are called {engine.model.name!r}: give one of them another served_model_name"
                        if engine.model.name == other.model.name
                        else f"{engine.model.name!r} and {other.model.name!r} are too alike: both would be "
                        f"{_deployment_name(engine)!r}"
                    )
        return models

    def engines(self) -> dict[str, EngineConfig]:
        """The engine of each model by the name of its Serve deployment, the default model first.

        `Engine` where there is one model; with `models:`, `Engine-NAME` for each, so that one more leaves the names of
        the others as they are.
        """
        return {_deployment_name(engine): engine for engine in self.models} or {ENGINE: self}


def _merged(shared: Mapping[str, Section], entry: Any) -> Any:
    """The configuration of one model as a user would write it in full."""
    data = {"model": entry} if isinstance(entry, str) else entry
    if isinstance(data, EngineConfig):
        data = data.model_dump(exclude_unset=True)
    if not isinstance(data, Mapping):
        return entry
    if isinstance(data.get("model"), str):
        data = {**data, "model": {"model": data["model"]}}
    sections = {key: section.model_dump(exclude_unset=True) for key, section in shared.items()}
    given = {key: {**sections.get(key, {}), **value} for key, value in data.items() if isinstance(value, Mapping)}
    return {**sections, **data, **given}


def _deployment_name(engine: EngineConfig) -> str:
    """Serve makes file names of it, and shows it in paths."""
    return f"{ENGINE}-{re.sub(r'[^A-Za-z0-9._-]', '-', engine.model.name)}"


def override(config: QuireConfig, overrides: Mapping[str, Mapping[str, Any]]) -> QuireConfig:
    """`config` with the given values (section -> key -> value). Raises `ConfigError`."""
    data = config.model_dump(exclude_unset=True)
    if config.models and {"model", "served_model_name"} & set(overrides.get("model", {})):
        raise ConfigError("model: the configuration names several models, of which none can be replaced here.")
    for target in data["models"] if config.models else (data,):
        for section, values in overrides.items():
            target[section] = {**target.get(section, {}), **values}
    return validate(data)


def validate(data: Mapping[str, Any]) -> QuireConfig:
    """A configuration from plain data. Raises `ConfigError` naming the key."""
    try:
        return QuireConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{dotted(first['loc'])}: {said(first)}") from error


def said(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ").splitlines()[0].rstrip(".!")
    given = error.get("input")
    return f"{message}, got {given!r}." if isinstance(given, str | int | float | bool) else f"{message}."


def dotted(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc)
