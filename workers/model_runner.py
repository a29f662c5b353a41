"""One step on one rank: update rows, gather inputs, forward, sample."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.kv_cache_spec import KVCacheConfig
from quire.engine.outputs import BatchLogprobs, ModelRunnerOutput, SchedulerOutput

from .input_batch import InputBatch, gather_inputs
from .layers.attention import LayerCache
from .models.model import Model
from .request_table import RequestTable
from .sampler import SamplerOutput, sample


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
        sampled_token_ids = np.full((len(step.rows), 1), -1, np.int32)
        if len(batch.sampling_rows) == 0 or not self._model.gives_logits:
            return ModelRunnerOutput(step_id=step.step_id, sampled_token_ids=sampled_token_ids)
        sampled = self._sample(hidden, batch)
        token_ids = sampled.token_ids.cpu().numpy().astype(np.int32)
        self._table.append(batch.sampling_rows, token_ids)
        sampled_token_ids[batch.sampling_indices, 0] = token_ids
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=sampled_token_ids,
            logprobs=_in_batch_order(sampled.logprobs, batch),
        )

    def _sample(self, hidden: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        logits = self._model.logits(hidden.index_select(0, batch.logits_indices))
        rows = batch.sampling_rows
        parameters = self._table.sampling.gather(rows, self._table.num_tokens[rows], self._table.token_ids, batch.masks)
        return sample(logits, parameters)


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
