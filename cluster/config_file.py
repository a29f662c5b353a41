"""Ray Serve config files that hold a `QuireConfig` as `args:`, and what they say about a service.

A file is checked as a whole before anything starts. Serve's own schemas ignore keys that they do not know, so a typo in
`autoscaling_config` would be silent; here every unknown key is an error with its line and the nearest right key.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from quire.engine.errors import ConfigError

from .config import ENGINE, GATEWAY, GRPC_SERVICER, IMPORT_PATH, QuireConfig, dotted, said

DEFAULT_GRPC_PORT = 9000  # Serve's

# What `configs/smollm2-cpu.yaml` spells out, for a service without a file.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    GATEWAY: {
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 128,
        },
        "graceful_shutdown_timeout_s": 600,
    },
    ENGINE: {"num_replicas": 1},
}


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """A service as it will be deployed. `deployments` are Serve's options by deployment name."""

    quire: QuireConfig = field(default_factory=QuireConfig)
    application: str = "quire"
    route_prefix: str = "/"
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC
    deployments: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(DEFAULT_OPTIONS))


def load_service(path: Path) -> ServiceConfig:
    """Read and check a Ray Serve config file. Raises `ConfigError` naming the file, the line and the key."""
    from ray.serve.schema import ServeDeploySchema

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not YAML: {error.problem}.") from error
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text, control characters, the 40th of May
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(data, dict) or root is None:
        raise ConfigError(f"{path}: must hold a mapping, as the files in configs/ do.")
    _check_keys(path, root, ServeDeploySchema)
    _validate(path, root, (), ServeDeploySchema, data)
    application, node = _the_application(path, root, data)
    _check_keys(path, _child(node, "args"), QuireConfig, prefix="args.")
    quire = _validate(path, node, ("args",), QuireConfig, application.get("args") or {})
    http = data.get("http_options") or {}
    grpc = data.get("grpc_options") or {}
    has_grpc = GRPC_SERVICER in grpc.get("grpc_servicer_functions", ())
    return ServiceConfig(
        quire=quire,
        application=application.get("name", "default"),
        route_prefix=application.get("route_prefix", "/"),
        host=http.get("host", "127.0.0.1"),
        port=http.get("port", 8000),
        grpc_port=grpc.get("port", DEFAULT_GRPC_PORT) if has_grpc else None,
        deployments=dict(_deployments(path, node, application, (GATEWAY, *quire.engines()))),
    )


def _the_application(path: Path, root: yaml.Node, data: dict[str, Any]) -> tuple[dict[str, Any], yaml.Node]:
    """The one application of ours in the file, and its node."""
    nodes = _child(root, "applications")
    ours = [i for i, each in enumerate(data["applications"]) if each.get("import_path") == IMPORT_PATH]
    if len(ours) != 1 or not isinstance(nodes, yaml.SequenceNode):
        raise ConfigError(f"{path}: needs exactly one application with import_path: {IMPORT_PATH}, has {len(ours)}.")
    return data["applications"][ours[0]], nodes.value[ours[0]]


def _deployments(
    path: Path, node: yaml.Node, application: dict[str, Any], known: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Serve's options by deployment name; `known` are the names of this application."""
    from ray.serve.config import AutoscalingConfig

    entries = _child(node, "deployments")
    for index, entry in enumerate(application.get("deployments") or []):
        name = entry["name"]
        if name not in known:
            assert isinstance(entries, yaml.SequenceNode)
            line = _line(_child(entries.value[index], "name"))
            raise ConfigError(f"{path}:{line}: there is no deployment {name!r}. {_nearest(name, known)}")
        if isinstance(entry.get("autoscaling_config"), dict):
            # Serve's schema of the file takes any mapping here, and fails later.
            assert isinstance(entries, yaml.SequenceNode)
            node = entries.value[index]
            _validate(path, node, ("autoscaling_config",), AutoscalingConfig, entry["autoscaling_config"])
        yield name, {key: value for key, value in entry.items() if key != "name"}


# Unknown keys


def _check_keys(path: Path, node: yaml.Node | None, model: type[BaseModel], prefix: str = "") -> None:
    """Every key of a mapping must be a field of `model`, and so on below it. Raises `ConfigError`."""
    if not isinstance(node, yaml.MappingNode):
        return
    known = model.model_fields
    for key_node, value_node in node.value:
        key = key_node.value
        if key not in known:
            raise ConfigError(
                f"{path}:{_line(key_node)}: there is no key {prefix + key!r}. {_nearest(key, list(known))}"
            )
        for inner in _models_in(known[key].annotation):
            items = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for item in items:
                _check_keys(path, item, inner, f"{prefix}{key}.")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that an annotation allows (Optional, Union, lists looked through), at most one of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, tuple):
        return [model for part in typing.get_args(annotation) for model in _models_in(part)][:1]
    return []


def _nearest(key: str, known: list[str] | tuple[str, ...]) -> str:
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"Did you mean {matches[0]!r}?" if matches else f"Known here: {', '.join(sorted(known))}."


# Values


def _validate(
    path: Path, node: yaml.Node, below: tuple[str, ...], model: type[BaseModel], data: Mapping[str, Any]
) -> Any:
    """`data` as `model`; an error says at which line the value stands."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        loc = (*below, *first["loc"])
        raise ConfigError(f"{path}:{_line_of(node, loc)}: {dotted(loc)}: {said(first)}") from error


def _line_of(node: yaml.Node, loc: tuple[int | str, ...]) -> int:
    """The line of the deepest part of `loc` that the file has (pydantic adds names of union members, which it has
    not)."""
    for part in loc:
        below = _child(node, part)
        if below is not None:
            node = below
    return _line(node)


def _child(node: yaml.Node | None, key: int | str) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        found: yaml.Node = node.value[key]
        return found
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == key), None)
    return None


def _line(node: yaml.Node | None) -> int:
    return 1 if node is None else node.start_mark.line + 1
