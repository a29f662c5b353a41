"""Command-line options that come from the engine's configuration: name, type, choices and help are those of the model.

So an option is described once, where it is defined, and a value is judged once, by the configuration itself.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from quire.engine.config import EngineConfig

# The options, by section. They are few on purpose: everything else is set in a configuration file.
Options = dict[str, tuple[str, ...]]
ENGINE_OPTIONS: Options = {
    "model": (
        *("model", "dtype", "device", "max_model_len", "implementation", "load_format", "quantization"),
        *("enforce_eager", "num_threads"),
    ),
    "parallel": ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel"),
    "scheduler": ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens"),
    "cache": ("num_kv_blocks", "gpu_memory_utilization", "block_size", "kv_cache_dtype", "enable_prefix_caching"),
}
SERVICE_OPTIONS: Options = {
    **ENGINE_OPTIONS,
    "model": (*ENGINE_OPTIONS["model"], "served_model_name", "chat_template", "tool_parser"),
    "scheduler": (*ENGINE_OPTIONS["scheduler"], "max_queued_requests"),
}
EngineOverrides = dict[str, dict[str, Any]]
Command = Callable[..., None]


def takes_engine_options(options: Options = ENGINE_OPTIONS) -> Callable[[Command], Command]:
    """Add options to a command, which receives those that were given as `engine`: section -> key -> value.

    The command must have a keyword-only parameter `engine: EngineOverrides`.
    """
    return functools.partial(_with_options, options)


def _with_options(options: Options, command: Command) -> Command:
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "engine"]
    added = [_parameter(section, key) for section, keys in options.items() for key in keys]

    @functools.wraps(command)
    def with_engine_options(**values: Any) -> None:
        overrides: EngineOverrides = {}
        for section, keys in options.items():
            given = {key: value for key in keys if (value := values.pop(key)) is not None}
            if given:
                overrides[section] = given
        _check(overrides)
        command(**values, engine=overrides)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *added]]
    with_engine_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    with_engine_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_engine_options


def _check(overrides: EngineOverrides) -> None:
    """Let the configuration judge what was given, and name the option at fault."""
    try:
        EngineConfig.model_validate(overrides)
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(first["msg"], param_hint=f"--{str(first['loc'][-1]).replace('_', '-')}") from error


def in_a_file(error: typer.TyperException) -> str:
    """What to add to an error of the command line: where to set what is no option, but a setting."""
    key = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    for section, field in EngineConfig.model_fields.items():
        if key in typing.cast(type[BaseModel], field.annotation).model_fields:
            return f" It is set in a config file, as {section}.{key} (`quire config` prints one)."
    return ""


def header_value(text: str | None) -> str | None:
    """The callback of an option that is sent in a header: refuses what none can carry."""
    if text is not None and not (text.isascii() and text.isprintable()):
        raise typer.BadParameter("must be of printable ASCII characters")
    return text


def help_without_command(text: str) -> Callable[[typer.Context], None]:
    """The callback of a group: its help text, printed when no command is named."""

    def group(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    group.__doc__ = text
    return group


def flatten(overrides: EngineOverrides) -> dict[str, Any]:
    """The same without sections, as keyword arguments of `quire.LLM`."""
    return {key: value for section in overrides.values() for key, value in section.items()}


def _parameter(section: str, key: str) -> inspect.Parameter:
    """One option, None when it is not given."""
    model = EngineConfig.model_fields[section].annotation
    field = typing.cast(type[BaseModel], model).model_fields[key]
    default = "" if field.default is None else f" (default: {field.default})"
    option = typer.Option(help=f"{field.description}{default}", show_default=False)
    annotation = typing.cast(Any, Annotated)[_without_none(field.annotation) | None, option]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        (kept,) = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        return kept
    return annotation
