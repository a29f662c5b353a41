"""Decoders that are not among our own families, and whether `transformers` knows them.

`transformers` is imported inside the functions: it brings torch, and only models of other families need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ConfigError


def check_known_decoder(path: Path, architecture: str, hf_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a decoder that `transformers` knows, with its defaults filled in.

    Raises `ConfigError` that says what was found, and what is supported, when it is something else.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

    model_type = str(hf_config.get("model_type"))
    names = CAUSAL_LMS.get(model_type, ())
    known = architecture in ((names,) if isinstance(names, str) else names)
    if hf_config.get("is_encoder_decoder"):
        raise _refusal(path, architecture, "it is an encoder with a decoder")
    if not known:
        if hf_config.get("auto_map"):
            raise _refusal(path, architecture, "it needs the code in its own directory (auto_map), which is never run")
        raise _refusal(path, architecture, f"transformers knows no such decoder for model_type {model_type!r}")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(hf_config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model: transformers cannot read the configuration of {path} ({error}).") from error
    if config.get_text_config() is not config:
        raise _refusal(path, architecture, "it is a decoder inside a model for more than text")
    # Configurations call these by names of their own, and files leave out what is the default.
    whole = {**config.to_dict(), **hf_config}
    for name in ("vocab_size", "max_position_embeddings"):
        value = getattr(config, name, None)
        if value is not None:
            whole[name] = value
    return whole


def _refusal(path: Path, architecture: str, found: str) -> ConfigError:
    return ConfigError(
        f"model: the architecture of {path} ({architecture}) is not supported: {found}. Supported are the families in "
        "the README, and decoders that transformers knows if they attend through its attention interface."
    )
