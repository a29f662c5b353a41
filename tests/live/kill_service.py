"""A small service on two ranks that may be struck by faults."""

from __future__ import annotations

import sys
from pathlib import Path

from quire.cluster.config import ENGINE, GATEWAY, QuireConfig

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("models", "unit")]

APPLICATION, MODEL = "kill", "tiny"


def make_model(folder: Path) -> Path:
    """A Llama with random weights, and its tokenizer."""
    from small_tokenizers import byte_level
    from tiny_llama import make_tiny_llama

    make_tiny_llama(folder, vocab_size=512, max_position_embeddings=1024)
    byte_level().backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def deploy_tiny(root: str, model: Path) -> str:
    """On the Ray that this process is connected to, where Serve listens at `root`; returns the service's URL."""
    from ray import serve

    from quire.cluster.app import bind

    config = QuireConfig.model_validate(
        {
            "model": {
                "model": str(model),
                "served_model_name": MODEL,
                "device": "cpu",
                "num_threads": 1,
                "chat_template": "hermes",
            },
            "parallel": {"tensor_parallel_size": 2, "step_timeout_s": 20.0},
            "cache": {"num_kv_blocks": 1024},
            "api": {"failover_timeout_s": 120.0},
            "allow_faults": True,
        }
    )
    options = {ENGINE: {"num_replicas": 1, "health_check_period_s": 1.0}, GATEWAY: {"num_replicas": 1}}
    serve.run(bind(config, options), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    return f"{root}/{APPLICATION}"
