"""Rotary frequencies of every scaling kind are those of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.engine.errors import ConfigError
from quire.workers.layers.rotary import inverse_frequencies
from quire.workers.models.families.reading import rotary_spec

HEAD_DIM, CONTEXT = 32, 4096
FACTORS = [1.0 + 0.2 * i for i in range(HEAD_DIM // 2)]
KINDS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {"factor": 8.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-ends": {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 20, "truncate": False},
    "longrope": {"original_max_position_embeddings": 512, "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
}


@pytest.mark.parametrize("max_model_len", [500, 4096, 12000])
@pytest.mark.parametrize("name", list(KINDS))
def test_frequencies(name: str, max_model_len: int) -> None:
    kind = name.split("-")[0]
    rope = {"rope_type": kind, "rope_theta": 50000.0, **KINDS[name]}
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=rope)
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    spec = rotary_spec(config.to_dict(), max_model_len, HEAD_DIM)
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert spec.magnitude == pytest.approx(magnitude)


def test_old_spellings() -> None:
    old = {"max_position_embeddings": 64, "rotary_emb_base": 500, "rotary_pct": 0.25}
    assert (rotary_spec(old, 64, 32).base, rotary_spec(old, 64, 32).rotary_dim) == (500.0, 8)
    scaled = {"max_position_embeddings": 64, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}}
    assert rotary_spec(scaled, 64, 32) == rotary_spec(new, 64, 32)


def test_unknown_kind() -> None:
    config = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "spiral"}}
    with pytest.raises(ConfigError, match=r"rope_type 'spiral' is not supported; default, linear, .* longrope are"):
        rotary_spec(config, 64, 32)
