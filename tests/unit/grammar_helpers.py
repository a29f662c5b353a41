"""A model without weights that says what its grammar allows: any of it, drawn by a seed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
from engine_helpers import Collector, make_core
from fake_executor import FakeExecutor

from quire.engine.config import GrammarConfig, ModelConfig
from quire.engine.core import EngineCore
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.compiler import LlguidanceCompiler
from quire.engine.grammar.gate import CompileGrammar, GrammarGate
from quire.engine.model_source import ModelInfo, load_model_info
from quire.engine.outputs import EngineRequest, IntArray, ModelRunnerOutput, SchedulerOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.tokenizer import load_tokenizer


@cache
def model() -> tuple[ModelInfo, Any]:
    """The default model's configuration and tokenizer; no weights."""
    info = load_model_info(ModelConfig())
    return info, load_tokenizer(info)


def compiler(**limits: Any) -> LlguidanceCompiler:
    info, tokenizer = model()
    return LlguidanceCompiler(lambda: tokenizer, info.vocab_size, info.eos_token_ids, GrammarConfig(**limits))


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", source=json.dumps(schema))


class BabblingExecutor(FakeExecutor):
    """Draws each token from those allowed, by seed and position alone, as a sampler would from flat logits.

    `favourites`: tokens that are said, where they are allowed, three times out of four.
    """

    def __init__(
        self, favourites: Sequence[int] = (), num_blocks: int = 4096, inflight: int = 1, **options: Any
    ) -> None:
        super().__init__(block_size=16, num_blocks=num_blocks, **options)
        self._favourites = np.array(sorted(favourites), np.int64)
        self._inflight = inflight
        self.num_masked = 0

    def preferred_inflight_steps(self) -> int:
        return self._inflight

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self._masks: dict[int, IntArray] = {}
        if step.grammar is not None:
            self._masks = dict(zip(step.grammar.indices.tolist(), step.grammar.allowed, strict=True))
        return super().execute(step)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super()._run(step)
        sampled = output.sampled_token_ids
        for index, row in enumerate(step.rows.tolist()):
            if index in self._masks:
                assert sampled[index, 0] >= 0, "a mask for a row that samples nothing"
                sampled[index, 0] = self._tokens[row][-1] = self._draw(index, row)
                self.num_masked += 1
            else:
                assert sampled[index, 0] < 0 or self._rows[row].request_id.startswith("plain"), "a mask is missing"
        return output

    def _draw(self, index: int, row: int) -> int:
        allowed = np.flatnonzero(np.unpackbits(self._masks[index].view(np.uint8), bitorder="little"))
        assert allowed.size, "an empty mask"
        new = self._rows[row]
        key = f"{new.seed} {new.choice_index} {len(self._tokens[row])}".encode()
        number = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
        liked = np.intersect1d(allowed, self._favourites, assume_unique=True)
        pool = liked if liked.size and number % 4 else allowed
        return int(pool[number // 4 % pool.size])


def make_grammar_core(
    executor: FakeExecutor | None = None, compile_grammar: CompileGrammar | None = None, **options: Any
) -> EngineCore:
    gate = GrammarGate(compile_grammar or shared_compiler().compile, lambda: core.wake())
    core = make_core(
        executor or BabblingExecutor(), gates=(gate,), **{"max_model_len": 4096, "max_num_seqs": 64, **options}
    )
    return core


@cache
def shared_compiler() -> LlguidanceCompiler:
    return compiler()


def constrained(
    request_id: str, spec: GrammarSpec, max_tokens: int = 64, seed: int = 0, **fields: Any
) -> EngineRequest:
    names = SamplingParams.__struct_fields__
    params = {name: fields.pop(name) for name in list(fields) if name in names}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=fields.pop("prompt", [1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        seed=seed,
        eos_token_ids=tuple(model()[0].eos_token_ids),
        grammar=spec,
        **fields,
    )


def run_all(core: EngineCore, requests: Sequence[EngineRequest], max_steps: int = 20_000) -> Collector:
    collector = Collector()
    for request in requests:
        collector.start(request)
        core.add_request(request)
    for _ in range(max_steps):
        if not core.has_work:
            return collector
        collector.take(core.step())
    raise AssertionError("the engine does not finish")


def text_of(collector: Collector, request_id: str) -> str:
    """The answer's text, without the token that ended it."""
    info, tokenizer = model()
    tokens = collector.tokens[request_id]
    if tokens and tokens[-1] in info.eos_token_ids:
        tokens = tokens[:-1]
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def shuffled(items: Sequence[Any], seed: int) -> list[Any]:
    result = list(items)
    random.Random(seed).shuffle(result)
    return result
