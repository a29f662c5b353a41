"""One step on one rank: update rows, gather inputs, forward, sample."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.kv_cache_spec import KVCacheConfig
from quire.engine.outputs import BatchLogprobs, IntArray, ModelRunnerOutput, SchedulerOutput

from .input_batch import InputBatch, gather_inputs
from .layers.attention import LayerCache
from .models.model import Model
from .request_table import RequestTable
from .sampler import sample


class ModelRunner:
    """Runs steps on a loaded model and an allocated cache. Owns the request table; not thread-safe."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        config: KVCacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._device = device
        self._block_size = config.block_size
        self._table = RequestTable(max_num_seqs, max_model_len, config.block_size, len(config.groups), model.vocab_size)
        groups = {layer: index for index, group in enumerate(config.groups) for layer in group.layer_indices}
        self._group_of_layer = [groups[layer] for layer in model.own_layers]

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. Every rank of the last stage returns the same; the others sample nothing."""
        self._table.update(step)
        batch = gather_inputs(step, self._table, self._block_size, self._device)
        metadata = [batch.metadata[group] for group in self._group_of_layer]
        hidden = self._model(batch.token_ids, batch.positions, self._caches, metadata)
        if not self._model.gives_logits:
            return ModelRunnerOutput(step_id=step.step_id, sampled_token_ids=np.full((len(step.rows), 1), -1, np.int32))
        sampled_token_ids, logprobs = self._sample(hidden, batch, len(step.rows))
        table = self._table
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=sampled_token_ids,
            logprobs=logprobs,
            prompt_logprobs=table.prompt_logprobs.compute(step, table.token_ids, self._model, hidden),
            embeddings=table.pooling.compute(step, self._model, hidden),
        )

    def _sample(self, hidden: torch.Tensor, batch: InputBatch, num_reqs: int) -> tuple[IntArray, BatchLogprobs | None]:
        """Sample for the rows that reach their last known token, and append the tokens to them.

        Returns the tokens of all requests of the batch, [num_reqs, 1], and the logprobs that some of them want.
        """
        sampled_token_ids = np.full((num_reqs, 1), -1, np.int32)
        rows = batch.sampling_rows
        if len(rows) == 0:
            return sampled_token_ids, None
        logits = self._model.logits(hidden.index_select(0, batch.logits_indices))
        parameters = self._table.sampling.gather(rows, self._table.num_tokens[rows], self._table.token_ids, batch.masks)
        sampled = sample(logits, parameters)
        token_ids = sampled.token_ids.cpu().numpy().astype(np.int32)
        self._table.append(rows, token_ids)
        sampled_token_ids[batch.sampling_indices, 0] = token_ids
        return sampled_token_ids, _in_batch_order(sampled.logprobs, batch)


def _in_batch_order(logprobs: BatchLogprobs | None, batch: InputBatch) -> BatchLogprobs | None:
    """The sampler counts the rows that sample; outputs count all requests of the batch."""
    if logprobs is None:
        return None
    return BatchLogprobs(
        indices=batch.sampling_indices[logprobs.indices],
        token_ids=logprobs.token_ids,
        logprobs=logprobs.logprobs,
        sampled_ranks=logprobs.sampled_ranks,
    )
