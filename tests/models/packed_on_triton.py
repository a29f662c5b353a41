"""Quantized checkpoints on the Triton backend, in its interpreter, as a GPU would load and compute them.

`TRITON_INTERPRET=1 python tests/models/packed_on_triton.py` prints one JSON object: by model, how many of its matrices
are packed, and the greedy tokens that it samples on the Triton backend and, with its numbers unpacked, on the CPU's.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from core_driver import Driver
from test_quantized_checkpoints import SCHEMES, gpt_oss, info_of, make

from quire.engine.config import EngineConfig
from quire.engine.model_source import ModelInfo
from quire.kernels.dispatch import forced_backend
from quire.workers.layers.parameter import PackedParameter
from quire.workers.local_executor import LocalExecutor

SETTINGS = {
    "model": {"num_threads": 1, "enforce_eager": True},
    "cache": {"num_kv_blocks": 32},
    "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 256},
}


def answers(info: ModelInfo, prompt_len: int, backend: AbstractContextManager[None]) -> tuple[int, list[list[int]]]:
    """To two prompts, one of them of so many tokens."""
    prompts = [[5, 9, 17], [i * i % 89 for i in range(prompt_len)]]
    with backend:
        executor = LocalExecutor(EngineConfig.model_validate(SETTINGS), info)
        tokens = [each.token_ids for each in Driver(executor, info.max_model_len).greedy(prompts, 3)]
        num_packed = sum(isinstance(each, PackedParameter) for each in executor._worker.model.parameters())
        executor.shutdown()
    return num_packed, tokens


def main() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        awq = make(Path(folder) / "awq", SCHEMES["awq, 128"][0], vocab_size=512, num_hidden_layers=1)
        # A prompt of more than are multiplied without unpacking a weight before, and one of experts.
        models = {"awq": (awq, 140), "gpt-oss": (gpt_oss(Path(folder) / "gpt-oss"), 20)}
        for name, (info, prompt_len) in models.items():
            num_packed, ours = answers(info, prompt_len, forced_backend("triton"))
            _, expected = answers(info_of(info.path / "plain"), prompt_len, nullcontext())
            found[name] = {"packed": num_packed, "tokens": ours, "expected": expected}
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
