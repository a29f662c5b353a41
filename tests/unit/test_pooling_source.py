"""What a model's files say about its embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.errors import ConfigError
from quire.engine.pooling import PoolingParams
from quire.engine.pooling_source import pooling_of

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


def write(path: Path, modules: Any, pooling: Any = None, folder: str = "1_Pooling") -> Path:
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(pooling))
    return path


def flags(**on: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 8, **{f"pooling_mode_{name}": on.get(name, False) for name in names}}


def test_a_model_that_says_nothing_has_its_last_token_normalized(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, None) == PoolingParams(type="last", normalize=True)
    assert pooling_of(tmp_path, "mean") == PoolingParams(type="mean", normalize=True)
    assert pooling_of(tmp_path / "model.gguf", None) == PoolingParams()


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (flags(lasttoken=True), "last"),
        (flags(mean_tokens=True), "mean"),
        (flags(cls_token=True), "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_pooling_module_is_read(tmp_path: Path, pooling: Any, kind: Any, normalize: bool) -> None:
    write(tmp_path, [TRANSFORMER, POOLING, *([NORMALIZE] if normalize else [])], pooling)
    assert pooling_of(tmp_path, None) == PoolingParams(type=kind, normalize=normalize)


def test_the_module_may_lie_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, [TRANSFORMER, {**POOLING, "path": "pool"}], flags(cls_token=True), folder="pool")
    assert pooling_of(tmp_path, None).type == "cls"


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ([TRANSFORMER, POOLING], flags(max_tokens=True), "pooling by max, which is not supported"),
        ([TRANSFORMER, POOLING], flags(mean_tokens=True, cls_token=True), "pooling by mean and cls"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "pooling by weightedmean"),
        ([TRANSFORMER, POOLING, DENSE], flags(lasttoken=True), "the module Dense of its modules.json"),
        ({}, None, "holds no JSON list"),
    ],
)
def test_what_is_not_supported_is_refused_unless_the_user_chooses(
    tmp_path: Path, modules: Any, pooling: Any, said: str
) -> None:
    write(tmp_path, modules, pooling)
    with pytest.raises(ConfigError, match=said):
        pooling_of(tmp_path, None)
    if isinstance(modules, list):
        assert pooling_of(tmp_path, "last") == PoolingParams(type="last", normalize=False)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json cannot be read"):
        pooling_of(tmp_path, None)
