"""How a model pools when nobody says: what its files tell, in the layout of sentence-transformers.

`modules.json` lists a pipeline: the transformer, then a Pooling module whose `config.json` says what it does, then
perhaps Normalize. A model without these files is no embedding model; its last hidden state stands for its prompt, and
vectors have length 1, as clients of the OpenAI API expect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .pooling import PoolingParams, PoolingType

_MODES: dict[str, PoolingType] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def pooling_of(path: Path, given: PoolingType | None) -> PoolingParams:
    """The pooling of the model at `path`; `given` is the user's choice of type.

    Raises `ConfigError` when the files ask for something that is not supported and the user did not choose.
    """
    modules = _read(path / "modules.json", list) if path.is_dir() else None
    if modules is None:
        return PoolingParams(type=given or "last")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules if isinstance(module, dict)}
    normalize = "Normalize" in kinds
    if given is not None:
        return PoolingParams(type=given, normalize=normalize)
    unsupported = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if unsupported:
        raise _unsupported(path, f"the module {', '.join(unsupported)} of its modules.json")
    folder = kinds.get("Pooling", {}).get("path", "1_Pooling")
    config = _read(path / str(folder) / "config.json", dict) or {}
    modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or [str(config.get("pooling_mode", "mean"))]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise _unsupported(path, f"pooling by {' and '.join(modes)}")
    return PoolingParams(type=_MODES[modes[0]], normalize=normalize)


def _unsupported(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"model: {path} embeds with {what}, which is not supported; last token, mean and cls are. Set model.pooling to "
        "one of last, mean and cls to serve it regardless."
    )


def _read(path: Path, kind: type) -> Any:
    """What a JSON file holds, or None where there is none."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read ({error}).") from error
    if not isinstance(value, kind):
        raise ConfigError(f"model: {path} holds no JSON {'list' if kind is list else 'object'}.")
    return value
