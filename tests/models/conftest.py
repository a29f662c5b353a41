"""The default model, loaded once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_reference import Reference
from rank_executors import ProcessExecutor
from smollm2_prompts import QUESTIONS, TEXTS

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import ModelInfo, load_model_info
from quire.engine.tokenizer import load_tokenizer
from quire.workers.local_executor import LocalExecutor


@pytest.fixture(scope="session")
def smollm2() -> ModelInfo:
    return load_model_info(ModelConfig())


@pytest.fixture(scope="session")
def tokenizer(smollm2: ModelInfo) -> Any:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[list[int]]:
    """20 prompts of 5 to 230 tokens; the first twelve share the system message of the chat template."""
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    return chats + [tokenizer.encode(text) for text in TEXTS]


# Room for all prompts and their answers at once. Without it, it would be a quarter of the machine's free memory, which
# an engine fills in idle moments: half a minute of a core, here taken from other tests.
CACHE = {"num_kv_blocks": 800}


@pytest.fixture(scope="session")
def smollm2_executor(smollm2: ModelInfo) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(EngineConfig.model_validate({"cache": CACHE}), smollm2)
    yield executor
    executor.shutdown()


@pytest.fixture(scope="session")
def smollm2_two_ranks(smollm2: ModelInfo) -> Iterator[ProcessExecutor]:
    config = EngineConfig.model_validate({"cache": CACHE, "parallel": {"tensor_parallel_size": 2}})
    executor = ProcessExecutor(config, smollm2)
    yield executor
    executor.shutdown()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: ModelInfo) -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2.path.parent, gguf_file=smollm2.path.name, dtype=torch.float32, local_files_only=True
    )
    return Reference(model)
