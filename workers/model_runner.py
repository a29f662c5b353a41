"""One step on one rank: update rows, gather inputs, forward, sample.

A step is *launched*: what it needs goes to the device in one copy, and everything is queued there without waiting for
any of it. The token that a row samples stays on the device and is the next step's input, which may be launched before
anybody has seen it:

    host      launch 1   launch 2   read 1   launch 3   read 2
    device    |--------- step 1 ---||------- step 2 ---||--- step 3 ...

On CPU helpers begin to compute a recorded decode step (`kernels.cpu.team`). The thread that launches it takes part when
it launches the next one, or asks for the result; any other step is computed then:

    host      launch 1   send 0, plan 2   helps with 1 | launch 2   send 1, plan 3   helps with 2 | launch 3 ...
    helpers             |---------- step 1 -----------|            |---------- step 2 -----------|

Where no more than one step is in flight, it is computed and its tokens are written down at once, and nobody reads them
from the device; all else is the same.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.engine.kv_cache_spec import KVCacheConfig
from quire.engine.outputs import (
    BatchLogprobs,
    FloatArray,
    IntArray,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
)
from quire.engine.speculation import MAX_STEP_DRAFTS
from quire.kernels.ops import AttentionMetadata
from quire.kernels.sampling import draw_tokens, likeliest_tokens

from .attention_metadata import build_attention_metadata
from .decode_graphs import Decoded, DecodeGraphs, End, GraphBackend, graph_sizes
from .device_rows import BlockChanges, DeviceRows
from .drafts import Entries
from .input_batch import InputBatch, gather_inputs, write_idle
from .input_buffers import BatchShape, DeviceInputs, HostInputs, InputBuffers
from .launched_step import HostCopies, LaunchedStep, Read, StepWork
from .layers.attention import LayerCache
from .models.model import Model, TokenStates, select_tokens
from .prompt_graph import AnyRowsBackend, PromptGraph
from .request_table import RequestTable
from .rest_graphs import RestGraphs
from .sampler import SampledScores, SamplerOutput, sample

_NOT_TOLD = nullcontext()  # nobody has to know


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large steps may be, and how many may be under way."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_inflight_steps: int


class RecordingBackend(GraphBackend, AnyRowsBackend, Protocol):
    """Makes graphs of steps while they are computed."""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A step whose tokens the request table has as references."""

    step_id: int
    launched: LaunchedStep
    indices: IntArray  # [n] of the requests that sample, in the batch
    rows: IntArray  # [n]
    generation: IntArray  # [n] of the rows
    positions: IntArray  # [n] where their first tokens stand
    has_drafts: bool  # how many tokens there are is still unknown


class _Asked(NamedTuple):
    """A step that is launched."""

    step: SchedulerOutput
    batch: InputBatch
    copies: HostCopies
    # Of its rows as they are now, for others may have them next:
    wants_more: bool  # than the tokens that are sampled
    keeps_states: bool  # until a later step, which must not write to the same memory


@dataclass(frozen=True, slots=True)
class _Last:
    """The last step on CPU, whose work may not be over."""

    work: StepWork
    reads_table: bool  # before the next step changes it


class ModelRunner:
    """Runs steps on a loaded model and an allocated cache. Owns the request table; one thread launches."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        config: KVCacheConfig,
        limits: StepLimits,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._limits = limits
        self._device = device
        num_seqs, self._num_groups = limits.max_num_seqs, len(config.groups)
        self._table = RequestTable(
            num_seqs, limits.max_model_len, config.block_size, self._num_groups, model.vocab_size
        )
        # Where nobody plans a step before the one before it is known, each token is written down when it is sampled:
        # none is a reference, and nothing is left to settle.
        self._has_references = limits.max_inflight_steps > 1
        self._rows = DeviceRows(self._table, device, keeps_tokens=self._has_references)
        # A draft is one more request to whoever computes it.
        self._most_entries = min(num_seqs + MAX_STEP_DRAFTS, limits.max_num_batched_tokens)
        self._buffers = InputBuffers(
            self._most_entries, limits.max_num_batched_tokens, self._num_groups, limits.max_inflight_steps, device
        )
        self._graphs: DecodeGraphs | None = None
        self._graph_ends: tuple[End, ...] = ()
        self._prompt_graph: PromptGraph | None = None
        self._rest_graphs: RestGraphs | None = None
        self._unsettled: deque[_Unsettled] = deque()
        # On CPU, where several steps may be in flight, the last one goes on when the next one begins.
        self._is_computed_later = self._has_references and device.type == "cpu"
        self._last: _Last | None = None
        groups = {layer: index for index, group in enumerate(config.groups) for layer in group.layer_indices}
        self._group_of_layer = [groups[layer] for layer in model.own_layers]

    @torch.inference_mode()
    def capture_graphs(self, backend: GraphBackend, *, progress: bool = False) -> None:
        """From now on decode steps are graphs, all captured here. To be called before the first step."""
        self._graph_ends = (End.HIDDEN, End.TOKENS, End.DRAWN) if self._model.gives_logits else (End.HIDDEN,)
        self._graphs = DecodeGraphs(backend, graph_sizes(self._most_decodes))
        self._graphs.capture_all(self._forward_in_place, self._prepare_idle, self._graph_ends, progress=progress)

    def record_graphs(self, backend: RecordingBackend, most: int) -> None:
        """From now on decode steps of up to `most` requests are graphs, each size recorded when it first comes, and all
        larger steps are one.

        The former go on to logits, at least: what has to be called for these one by one takes longer than they do.
        """
        self._graph_ends = (End.LOGITS, End.TOKENS, End.DRAWN) if self._model.gives_logits else (End.HIDDEN,)
        sizes = list(range(1, min(most, self._most_entries) + 1))
        self._graphs = DecodeGraphs(backend, sizes)
        self._prompt_graph = PromptGraph(backend, self._limits.max_num_batched_tokens, self._num_groups)
        if self._model.gives_logits:
            self._rest_graphs = RestGraphs(backend, self._model, self._prompt_graph, sizes[-1])

    @property
    def _most_decodes(self) -> int:
        return min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)

    def launch(self, step: SchedulerOutput, busy: AbstractContextManager[object] = _NOT_TOLD) -> LaunchedStep:
        """Start one step. Every rank of the last stage has the same result; the others sample nothing.

        `busy` is entered while the host computes for it later.
        """
        with torch.inference_mode():
            return self._launch(step, busy)

    def drop(self) -> None:
        """The result of the step under way is not wanted any more, and nobody computes it when this returns."""
        last, self._last = self._last, None
        if last is not None:
            last.work.drop()

    def _launch(self, step: SchedulerOutput, busy: AbstractContextManager[object]) -> LaunchedStep:
        if self._last is not None and self._last.reads_table:
            self._end_last()
        # How many tokens a row with drafts has got: the engine knows it before the row is in a step again, though
        # perhaps from another rank.
        is_open = any(each.has_drafts for each in self._unsettled)
        while self._unsettled and (is_open or self._unsettled[0].launched.is_known):
            self._settle()
        table, entries = self._table, Entries.of(step)
        table.update(step)
        wants_more = table.is_asked_for_more(step)
        size = None if wants_more else self._graph_size(entries)
        shape = BatchShape(len(entries.rows), entries.num_tokens) if size is None else BatchShape(size, size)
        target = self._buffers.begin(shape)
        batch = gather_inputs(step, entries, table, target, samples=self._model.gives_logits)
        changes, copies = BlockChanges(table, target), HostCopies(self._device)
        keeps_states = table.pooling.concerns(step.rows)
        asked = _Asked(step, batch, copies, wants_more=wants_more, keeps_states=keeps_states)
        end = None if size is None else self._graph_end(batch)
        self._end_last()  # on CPU one step is computed at a time
        work = StepWork(self._work(asked, changes, shape, end))
        if self._is_computed_later and step.drafts is None:
            # The likeliest token needs no parameters, and a graph that gives tokens finds them in its inputs.
            reads_parameters = not batch.takes_likeliest and (end is None or not end.gives_tokens)
            self._last = _Last(work, reads_table=reads_parameters or asked.wants_more)
        else:  # drafts stand where the table is about to have what is sampled
            work.end()
        launched = LaunchedStep(copies, work, busy)
        if self._model.gives_logits and len(batch.sampling):
            self._expect(step, batch, launched)
        return launched

    def _end_last(self) -> None:
        """Raises `RuntimeError` where the step before fails."""
        last, self._last = self._last, None
        if last is not None:
            try:
                last.work.end()
            except Exception as error:
                raise RuntimeError("the step before it failed") from error

    def _work(
        self, asked: _Asked, changes: BlockChanges, shape: BatchShape, end: End | None
    ) -> Generator[bool, None, Read]:
        """See `StepWork`. `end`: of a graph, if it is one."""
        step, batch = asked.step, asked.batch
        host, inputs = self._buffers.upload(shape)
        changes.apply(self._rows, inputs)
        try:
            if self._graphs is not None and end is not None:
                begun = self._graphs.begin(self._forward_in_place, shape.num_reqs, end)
                yield begun.is_under_way and step.grammar is None  # whose next masks follow from what is sampled
                computed: Decoded | TokenStates = begun.end()
            else:
                yield False
                given = self._model_inputs(host, inputs, batch.max_blocks, reads_references=batch.reads_references)
                computed = self._compute_step(*given, keeps_states=asked.keeps_states)
            if self._model.gives_logits:
                return self._finish(asked, inputs, computed)
        except BaseException:  # it is given up, garbage, or interrupted: helpers use the memory until this returns
            if self._device.type == "cpu":
                _join_helpers()
            raise
        nothing = ModelRunnerOutput(step_id=step.step_id, sampled_token_ids=batch.entries.accept(*_NO_TOKENS))
        return lambda: nothing

    def _expect(self, step: SchedulerOutput, batch: InputBatch, launched: LaunchedStep) -> None:
        """Some requests of a step sample: what the table has of that until somebody knows the tokens."""
        indices = batch.entries.requests(batch.sampling)
        table, rows = self._table, step.rows[indices]
        if not self._has_references:
            table.append_tokens(rows, launched.result().sampled_token_ids[indices])
            return
        positions, generation = table.append_references(rows), table.generation[rows]
        has_drafts = step.drafts is not None
        self._unsettled.append(_Unsettled(step.step_id, launched, indices, rows, generation, positions, has_drafts))

    def _graph_size(self, entries: Entries) -> int | None:
        return None if self._graphs is None else self._graphs.size_for(len(entries.rows), entries.num_tokens)

    def _graph_end(self, batch: InputBatch) -> End:
        """How far the graph of a step goes; the first of those that there are is for all steps."""
        if batch.is_plain and batch.all_sample and End.TOKENS in self._graph_ends:
            return End.TOKENS if batch.is_greedy else End.DRAWN
        return self._graph_ends[0]

    def _model_inputs(
        self, host: HostInputs, inputs: DeviceInputs, max_blocks: int, *, reads_references: bool
    ) -> tuple[Tensor, Tensor, list[AttentionMetadata]]:
        """Token ids and positions, and the metadata of each group. `host` and `inputs` hold the same numbers."""
        token_ids = self._rows.resolve(inputs.token_ids) if reads_references else inputs.token_ids
        by_group = build_attention_metadata(host, inputs, self._rows.block_tables, max_blocks)
        return token_ids, inputs.positions, by_group

    def _compute(self, token_ids: Tensor, positions: Tensor, by_group: Sequence[AttentionMetadata]) -> TokenStates:
        metadata = [by_group[group] for group in self._group_of_layer]
        return self._model(token_ids, positions, self._caches, metadata)

    def _compute_step(
        self, token_ids: Tensor, positions: Tensor, by_group: list[AttentionMetadata], *, keeps_states: bool
    ) -> TokenStates:
        """keeps_states: see `_Asked`."""
        if self._prompt_graph is None or keeps_states:
            return self._compute(token_ids, positions, by_group)
        return self._prompt_graph.forward(self._compute, token_ids, positions, by_group)

    def _prepare_idle(self, size: int) -> None:
        """Inputs of `size` requests of one token, which is stored nowhere. They read the null block."""
        shape = BatchShape(size, size)
        write_idle(self._buffers.begin(shape), self._table.no_row)
        self._buffers.upload(shape)

    def _forward_in_place(self, size: int, end: End) -> Decoded:
        """The forward of whatever inputs are there for a batch of `size` tokens: the one that is captured."""
        host, inputs = self._buffers.current(BatchShape(size, size))
        given = self._model_inputs(host, inputs, self._rows.max_blocks, reads_references=True)
        states = self._compute(*given)
        if not self._model.gives_logits:
            return Decoded()
        hidden = self._model.last_hidden_state(states)
        if end is End.LOGITS:
            return Decoded(logits=self._model.logits(hidden))
        if end is End.HIDDEN:
            return Decoded(hidden)
        if end is End.TOKENS:
            tokens = self._model.likeliest(hidden)
        else:
            tokens = draw_tokens(self._model.logits(hidden), inputs.draws(size))
        self._rows.write_tokens(inputs.sampling_rows, tokens)  # last: what cannot be recorded is done once more
        return Decoded(token_ids=tokens)

    def _finish(self, asked: _Asked, inputs: DeviceInputs, computed: Decoded | TokenStates) -> Read:
        """Sample, and start to copy what the step is asked for to the host.

        computed: what a graph gave; or the states, of which the rest is computed here.
        """
        table, step, copies = self._table, asked.step, asked.copies
        prompt_logprobs: Callable[[], list[tuple[int, PromptLogprobs]]] = list
        embeddings: Callable[[], list[tuple[int, FloatArray]]] = list
        if asked.wants_more:  # of states, which what samples may overwrite
            assert not isinstance(computed, Decoded)
            prompt_logprobs = table.prompt_logprobs.compute(step, table.token_ids, self._model, computed, copies)
            embeddings = table.pooling.compute(step, self._model, computed, copies)
        sampled = self._sample(asked, inputs, computed)

        def read() -> ModelRunnerOutput:
            token_ids, logprobs = sampled()
            return ModelRunnerOutput(
                step_id=step.step_id,
                sampled_token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs(),
                embeddings=embeddings(),
            )

        return read

    def _sample(
        self, asked: _Asked, inputs: DeviceInputs, computed: Decoded | TokenStates
    ) -> Callable[[], tuple[IntArray, BatchLogprobs | None]]:
        """Sample for the rows that reach their last known token. The tokens stay on the device for the next step.

        Returns what gives, when `copies` are there, the tokens of all requests of the batch, as in `ModelRunnerOutput`,
        and the logprobs that some of them want.
        """
        batch, copies = asked.batch, asked.copies
        num_sampling, entries = len(batch.sampling), batch.entries
        if num_sampling == 0:
            return lambda: (entries.accept(*_NO_TOKENS), None)
        if isinstance(computed, Decoded) and computed.token_ids is not None:
            token_ids = copies.start(computed.token_ids, is_reused=True)
            return lambda: (entries.accept(batch.sampling, token_ids.numpy()[:num_sampling]), None)
        sampled = self._choose(asked, inputs, self._of_sampling(batch, computed, inputs.logits_indices[:num_sampling]))
        self._rows.write_tokens(inputs.sampling_rows[:num_sampling], sampled.token_ids)
        token_ids = copies.start(sampled.token_ids)
        scores = None if sampled.logprobs is None else sampled.logprobs.map(copies.start)

        def read() -> tuple[IntArray, BatchLogprobs | None]:
            accepted = entries.accept(batch.sampling, token_ids.numpy())
            return accepted, None if scores is None else _in_batch_order(scores, batch, accepted)

        return read

    def _of_sampling(self, batch: InputBatch, computed: Decoded | TokenStates, indices: Tensor) -> Decoded:
        """Of the tokens that sample, [num_sampling] in the batch: their last hidden state, or what follows from it."""
        if isinstance(computed, Decoded):
            is_all = all(each is None or len(each) == len(indices) for each in computed)
            return computed if is_all else computed.map(lambda each: each.index_select(0, indices))
        if self._rest_graphs is not None:
            decoded = self._rest_graphs.compute(computed, indices, End.TOKENS if batch.takes_likeliest else End.LOGITS)
            if decoded is not None:
                return decoded
        is_all = len(computed[0]) == len(indices)
        return Decoded(self._model.last_hidden_state(computed if is_all else select_tokens(computed, indices)))

    def _choose(self, asked: _Asked, inputs: DeviceInputs, decoded: Decoded) -> SamplerOutput:
        """Tokens for `batch.sampling_rows`, to which the rows of `decoded` belong."""
        batch, table = asked.batch, self._table
        rows = batch.sampling_rows
        logits = decoded.logits
        if decoded.token_ids is not None:
            return SamplerOutput(decoded.token_ids.clone(), None)
        if logits is None:
            assert decoded.hidden is not None
            if batch.takes_likeliest:
                return SamplerOutput(self._model.likeliest(decoded.hidden), None)
            logits = self._model.logits(decoded.hidden)
        elif batch.takes_likeliest:
            return SamplerOutput(likeliest_tokens(logits), None)
        if table.sampling.reads_tokens(rows):
            # Where a device computes, the forward is under way: it does not wait with us.
            while self._unsettled and self._unsettled[0].step_id != asked.step.step_id:
                self._settle()
        parameters = table.sampling.gather(rows, batch.sampling_positions, table.token_ids, batch.masks)
        return sample(logits, None if batch.is_greedy else inputs.draws(len(rows)), parameters)

    def _settle(self) -> None:
        """Write down what the oldest step has sampled; waits for it where nobody has."""
        step = self._unsettled.popleft()
        token_ids = step.launched.result().sampled_token_ids[step.indices]
        self._table.settle(step.rows, step.generation, step.positions, token_ids)


def _join_helpers() -> None:
    if sys.is_finalizing():
        return  # they have ended (`atexit`), and nothing can be imported any more
    from quire.kernels.cpu.team import join_all

    join_all()


_NO_TOKENS = np.empty(0, np.int32), np.empty(0, np.int32)


def _in_batch_order(sampled: SampledScores, batch: InputBatch, accepted: IntArray) -> BatchLogprobs:
    """The sampler counts the entries that sample; outputs count all requests of the batch, and leave out tokens that
    are not in `accepted`, behind a draft that was wrong.
    """
    entries, scores = batch.sampling[sampled.indices], sampled.scores
    indices = batch.entries.indices[entries]
    counts = accepted[indices, batch.entries.depths[entries]] >= 0
    return BatchLogprobs(
        indices=indices[counts],
        token_ids=scores.token_ids.numpy()[counts],
        logprobs=scores.logprobs.numpy()[counts],
        sampled_ranks=scores.ranks.numpy()[counts],
    )
