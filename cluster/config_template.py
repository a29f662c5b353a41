"""A config file with every setting of Quire and its default: `quire config` prints it, docs/configuration.md shows it.

Settings stand behind a `#` without a space, their descriptions behind one with a space:

    scheduler:
      # Most requests that run at the same time.
      #max_num_seqs: 128
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterator

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .config import IMPORT_PATH, QuireConfig

_WIDTH = 112
_HEAD = f"""\
# A service of Quire, as one Ray Serve config file.
#
#   quire serve FILE     runs it on this machine
#   quire deploy FILE    runs it on a Ray cluster
#
# `args:` has every setting of Quire with its default, behind a '#'. To change one, remove the '#' before it and before
# the section that it is in.

proxy_location: HeadOnly
http_options:
  host: 127.0.0.1 # 0.0.0.0 to be reached from other machines
  port: 8000

applications:
  - name: quire
    route_prefix: /
    import_path: {IMPORT_PATH}

    args:
"""
_TAIL = """
    deployments: # Ray Serve's options: replicas, resources, autoscaling
      - name: Gateway
        autoscaling_config: {min_replicas: 1, max_replicas: 2, target_ongoing_requests: 128}
        graceful_shutdown_timeout_s: 600
      - name: Engine
        num_replicas: 1
"""
_MODELS = 'Several models behind one address, in place of `model:`. Each has engines of its own ("Engine-NAME").'
_TWO_MODELS = "[smollm2-135m-instruct, {model: {model: /models/llama-3.1-8b, served_model_name: llama}}]"
_ACTIVE = ("model", "model")  # the one setting that is not behind a '#'


def config_template() -> str:
    """The whole file, in YAML."""
    return _HEAD + "\n".join(_lines()) + "\n" + _TAIL


def _lines() -> Iterator[str]:
    for name, field in QuireConfig.model_fields.items():
        if name == "models":
            yield from _described(_MODELS, 6)
            yield f"      #models: {_TWO_MODELS}"
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _section(name, field.annotation)
        else:
            yield from _setting(name, field, 6)


def _section(name: str, section: type[BaseModel]) -> Iterator[str]:
    yield from _described((section.__doc__ or "").splitlines()[0], 6)
    yield f"      {'' if name == _ACTIVE[0] else '#'}{name}:"
    for key, field in section.model_fields.items():
        yield from _setting(key, field, 8, is_active=(name, key) == _ACTIVE)


def _setting(key: str, field: FieldInfo, indent: int, *, is_active: bool = False) -> Iterator[str]:
    choices = [str(each) for each in _choices(field.annotation)]
    text = f"{field.description} One of {', '.join(choices)}." if choices else str(field.description)
    yield from _described(text, indent)
    value = yaml.safe_dump(field.default, default_flow_style=True).splitlines()[0]
    yield f"{' ' * indent}{'' if is_active else '#'}{key}: {value}"


def _described(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent + "# ", subsequent_indent=" " * indent + "# ")


def _choices(annotation: object) -> list[object]:
    """The words that a setting may be; none where it is something else."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in _choices(part)]
