"""A load needs little memory beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_memory import NUM_SHARDS, SHARD_BYTES, make_checkpoint, measure

# Python's and torch's own small allocations during a load: modules, names, open files.
SLACK = 24 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    make_checkpoint(directory)
    assert len(list(directory.glob("model-*.safetensors"))) >= NUM_SHARDS
    return directory


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_load_takes_one_tensor_more_than_the_weights(checkpoint: Path, implementation: str) -> None:
    """Reading a shard before copying it would take 32 MiB and more, reading all of them 256 MiB."""
    load = measure(checkpoint, implementation)
    print(load)
    assert load.largest_tensor == SHARD_BYTES
    assert load.weight_bytes > (NUM_SHARDS - 1) * SHARD_BYTES
    assert load.extra_bytes > -SLACK
    assert load.extra_bytes < load.largest_tensor + SLACK
