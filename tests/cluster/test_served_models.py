"""The gateway's models: loaded when they are asked for, and independent of each other's faults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from quire.cluster import served_models
from quire.cluster.served_models import ServedModels
from quire.engine.config import ModelConfig
from quire.engine.errors import ConfigError, EngineError, ModelNotFoundError
from quire.engine.model_source import ModelInfo

FIRST = ModelConfig(served_model_name="first")
SECOND = ModelConfig(served_model_name="second", max_model_len=100)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models whose tokenizers were loaded, in order."""
    names: list[str] = []
    real = served_models.load_tokenizer

    def load(info: ModelInfo) -> object:
        names.append(info.name)
        return real(info)

    monkeypatch.setattr(served_models, "load_tokenizer", load)
    return names


async def test_a_tokenizer_is_loaded_when_somebody_asks(loaded: list[str]) -> None:
    models = ServedModels([FIRST, SECOND])
    await models.start()
    assert loaded == ["first"]
    assert [card.id for card in models.cards()] == ["first", "second"]
    asked = await asyncio.gather(*(models.load("second") for _ in range(5)))
    assert loaded == ["first", "second"]
    assert {id(served) for served in asked} == {id(asked[0])}
    assert asked[0].name == "second"
    await models.load("first")
    assert loaded == ["first", "second"]


async def test_an_unknown_model_lists_what_is_served() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'third' does not exist. Served here: first, second\."):
        await ServedModels([FIRST, SECOND]).load("third")


async def test_limits_hold_for_what_is_loaded_later() -> None:
    models = ServedModels([FIRST, SECOND])
    await models.start()
    assert [card.max_model_len for card in models.cards()] == [8192, 100]
    models.limit({"second": 50, "first": 1000, "another's": 1})
    assert [card.max_model_len for card in models.cards()] == [1000, 50]
    for name, limit in (("first", 1000), ("second", 50)):
        assert (await models.load(name)).input_processor.max_model_len == limit


async def test_a_broken_model_harms_no_other_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    models = ServedModels([ModelConfig(model=str(path)), FIRST])
    await models.start()  # the default model is the broken one
    assert (await models.load("first")).name == "first"
    assert "does not exist" in str(models.faults()["broken"])
    assert models.faults()["first"] is None
    with pytest.raises(EngineError, match=r"The model 'broken' cannot be served just now: .*does not exist"):
        await models.load("broken")
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(EngineError, match="has no usable 'vocab_size'"):
        await models.load("broken")


async def test_with_no_model_at_all_there_is_no_gateway(tmp_path: Path) -> None:
    models = ServedModels([ModelConfig(model=str(tmp_path / name)) for name in ("a", "b")])
    with pytest.raises(ConfigError, match="/a' does not exist"):
        await models.start()


async def test_only_engines_with_priorities_heed_them() -> None:
    models = ServedModels([FIRST, SECOND], ["second"])
    assert [(await models.load(name)).has_priorities for name in ("first", "second")] == [False, True]
