"""Steps with prompts of any length, repeated from a record of one, have bit by bit what they have call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from core_driver import Answer, Driver
from inflight_executor import CountedBackend
from tiny_families import TINY_FAMILIES, VOCAB_SIZE
from torch import Tensor

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.pooling import PoolingParams
from quire.engine.sampling_params import SamplingParams
from quire.kernels.cpu.intrinsics import IS_X86
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.team import team_of
from quire.workers.decode_graphs import End
from quire.workers.local_executor import LocalExecutor
from quire.workers.prompt_graph import PromptGraph

BATCHES = (
    (40,), (1, 33, 97), (33,), (16, 17), (40, 97), (126,), (2, 3), (4, 5), (25,), (6,), (60, 1, 60, 1), (24,)
)  # fmt: skip
ATTENDED_BY_TORCH = ("mistral",)  # with heads of 24
ONE_BY_ONE = ("mixtral", "qwen3-moe", "olmoe", "gpt-oss", *ATTENDED_BY_TORCH)  # experts get the tokens that choose them
ANSWER = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=2)
WIDE = replace(
    TINY_FAMILIES["llama"], settings={"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 192}
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CountedBackend:
    counted = CountedBackend()
    monkeypatch.setattr("quire.workers.cpu_graphs.CpuGraphBackend", lambda: counted)
    return counted


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def driver(path: Path, eager: bool, model: dict | None = None, **sections: dict[str, object]) -> Driver:
    fields = {"model": str(path), "device": "cpu", "num_threads": 2, "enforce_eager": eager, **(model or {})}
    config = EngineConfig.model_validate({"model": fields, **sections})
    return Driver(LocalExecutor(config, load_model_info(ModelConfig(model=str(path)))), 128, **sections)


def answers_of(found: Driver) -> list[Answer]:
    return [answer for lengths in BATCHES for answer in found.greedy(prompts_of(lengths), 3, 4)]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_families(tmp_path: Path, backend: CountedBackend, family: str) -> None:
    """Of sizes that whole vectors hold, as those of real models: the library multiplies others, by their number."""
    tiny = TINY_FAMILIES[family]
    wide = {"gpt2": {"n_inner": 96}, "opt": {"ffn_dim": 96}}.get(family, {"intermediate_size": 96})
    if "intermediate_size" not in tiny.dropped or family == "gpt2":
        tiny = replace(tiny, settings={**tiny.settings, **wide})
    tiny.make(tmp_path)
    cache = {"enable_prefix_caching": False}
    expected, found = (answers_of(driver(tmp_path, eager, cache=cache)) for eager in (True, False))
    assert found == expected
    is_recorded = IS_X86 and family not in ONE_BY_ONE
    assert backend.prompts_recorded_with == ([41, 7] if is_recorded else [])
    assert backend.prompts_replayed == ([131, 33, 33, 137, 126, 9, 25, 6, 122, 24] if is_recorded else [])
    assert (backend.num_replays > 0) == (family not in ATTENDED_BY_TORCH)  # of decode steps
    assert (backend.num_rests_replayed > 0) == is_recorded


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ({}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"quantization": "int8"}, {}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}),
    ],
    ids=["float32", "bfloat16", "int8", "float32-fp8-cache", "bfloat16-fp8-cache"],
)
def test_types(tmp_path: Path, backend: CountedBackend, model: dict, cache: dict, num_threads: int) -> None:
    """Steps as the scheduler makes them: parts of prompts beside decodes, and prefixes that are in the cache."""
    WIDE.make(tmp_path)
    model = {**model, "num_threads": num_threads}
    sections = {"scheduler": {"max_num_batched_tokens": 90}, "cache": cache}
    eager, recorded = (driver(tmp_path, eager, model, **sections) for eager in (True, False))
    assert answers_of(recorded) == answers_of(eager)
    assert len(set(backend.prompts_replayed)) >= 5 or not IS_X86
    assert min(backend.prompts_replayed, default=0) < 10


def test_more_decodes_than_have_graphs(tmp_path: Path, backend: CountedBackend) -> None:
    """They are steps of any number of tokens as well."""
    WIDE.make(tmp_path)
    prompts = prompts_of(tuple(range(3, 43)))
    expected, found = (driver(tmp_path, eager).greedy(prompts, 20, 2) for eager in (True, False))
    assert found == expected
    assert backend.prompts_replayed.count(40) >= 18 or not IS_X86


def test_largest_steps(tmp_path: Path, backend: CountedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all tokens there may be, as a graph; those that it has no memory for, call by call."""
    WIDE.make(tmp_path)
    monkeypatch.setattr("quire.workers.prompt_graph._MOST_RECORDED", 96)
    sections = {"scheduler": {"max_num_batched_tokens": 112}}
    expected, found = (answers_of(driver(tmp_path, eager, **sections)) for eager in (True, False))
    assert found == expected
    assert max(backend.prompts_replayed, default=0) <= 97
    backend.prompts_replayed.clear()
    sections = {"scheduler": {"max_num_batched_tokens": 96}}
    assert answers_of(driver(tmp_path, False, **sections)) == expected
    assert max(backend.prompts_replayed, default=96) == 96


@pytest.mark.parametrize("most_tokens", [4, 20, 90])
def test_few_tokens_first(tmp_path: Path, backend: CountedBackend, most_tokens: int) -> None:
    """Steps of a few, in records of their own, and larger ones where there may be some."""
    WIDE.make(tmp_path)
    sections = {"scheduler": {"max_num_batched_tokens": most_tokens}}
    eager, recorded = (driver(tmp_path, eager, **sections) for eager in (True, False))
    for lengths in ((3,), (2,), (4,), (2, 2), (5, 4), (19,), (60,), (3, 1), (75, 2)):
        prompts = prompts_of(lengths)
        assert recorded.greedy(prompts, 3, 4) == eager.greedy(prompts, 3, 4)
    if IS_X86:
        assert backend.prompts_recorded_with == ([7, 61] if most_tokens == 90 else [7])
        assert {2, 4} <= set(backend.prompts_replayed)
        assert max(backend.prompts_replayed) == {4: 4, 20: 20, 90: 77}[most_tokens]


@dataclass
class _FewOrMany:
    """A record, and its backend: up to 48 rows have kernels of their own."""

    least_rows: int = 1
    most_rows: int = 48
    recorded: list[tuple[int, int]] = field(default_factory=list)  # with so many rows, and room for so many
    replayed: list[int] = field(default_factory=list)
    inputs: Sequence[Tensor] = ()
    is_capable: bool = True

    def capture_any_rows(
        self, run: Callable[[], tuple[Tensor, ...]], num_rows: int, most_rows: int, inputs: Sequence[Tensor]
    ) -> tuple[_FewOrMany, tuple[Tensor, ...]] | None:
        self.recorded.append((num_rows, most_rows))
        if not self.is_capable:
            return None
        least, most = (1, min(48, most_rows)) if num_rows <= 48 else (49, most_rows)
        return _FewOrMany(least, most, replayed=self.replayed, inputs=inputs), run()

    def replay(self, num_rows: int) -> tuple[Tensor, ...]:
        self.replayed.append(num_rows)
        return (self.inputs[0][0, :num_rows, None],)

    def compute(self, lengths: Sequence[int]) -> None:
        """Steps of so many tokens, up to 256."""
        graph = PromptGraph(self, 256, num_groups=0)
        for num_tokens in lengths:
            token_ids = torch.arange(num_tokens)
            (found,) = graph.forward(lambda tokens, _positions, _groups: (tokens[:, None],), token_ids, token_ids, [])
            assert torch.equal(found[:, 0], token_ids)


@pytest.mark.parametrize(
    ("lengths", "recorded", "replayed"),
    [
        ((40, 33, 100, 128, 49, 12, 48), [(41, 257), (101, 257)], [33, 128, 49, 12, 48]),
        # 48 would be padded to 53, which are many.
        ((100, 128, 48, 49, 27, 33, 48, 25, 60), [(101, 257), (29, 48)], [128, 49, 33, 48, 25, 60]),
        ((3, 20, 300, 25, 60, 24), [(7, 24), (29, 257), (61, 257)], [20, 24]),
    ],
)
def test_few_and_many_have_records_of_their_own(
    lengths: tuple[int, ...], recorded: list[tuple[int, int]], replayed: list[int]
) -> None:
    """Whichever come first."""
    backend = _FewOrMany()
    backend.compute(lengths)
    assert (backend.recorded, backend.replayed) == (recorded, replayed)


def test_what_cannot_be_recorded_is_tried_once() -> None:
    backend = _FewOrMany(is_capable=False)
    backend.compute((3, 2, 100, 128, 30, 7))
    assert backend.recorded == [(7, 24), (101, 257)]


@pytest.mark.parametrize("model", [{"enforce_eager": True}, {"quantization": "fp8"}], ids=["enforce_eager", "fp8"])
def test_what_is_not_recorded(tmp_path: Path, backend: CountedBackend, model: dict) -> None:
    WIDE.make(tmp_path)
    expected, found = (answers_of(driver(tmp_path, eager, model)) for eager in (True, False))
    assert found == expected
    assert backend.prompts_recorded_with == []


def test_what_follows_prompts_has_graphs_of_its_own(tmp_path: Path, backend: CountedBackend) -> None:
    """Of each number of tokens that sample: up to the likeliest, or to logits where something is asked of these."""
    WIDE.make(tmp_path)
    eager, recorded = (driver(tmp_path, eager) for eager in (True, False))
    for lengths, logprobs in (((40, 33), None), ((41,), None), ((42, 34), 2), ((43, 35), None), ((44, 36), 2)):
        prompts = prompts_of(lengths)
        assert recorded.greedy(prompts, 3, logprobs) == eager.greedy(prompts, 3, logprobs)
    if IS_X86:
        assert backend.rests_captured == [(2, End.TOKENS), (1, End.TOKENS), (2, End.LOGITS)]
        assert backend.num_rests_replayed == 2


def test_an_interrupt_amid_what_follows_a_prompt(
    tmp_path: Path, backend: CountedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody computes any more when it is raised: the memory may be freed."""
    WIDE.make(tmp_path)
    recorded = driver(tmp_path, eager=False)
    for seed in (40, 41):
        recorded.greedy(prompts_of((seed,)), 2)
    join, interrupted = Program.join, []

    def interrupt(self: Program) -> None:
        """That of what follows is the only one whose helpers are not joined, once."""
        if len(self._calls) < 20 and not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt
        join(self)

    monkeypatch.setattr(Program, "join", interrupt)
    if IS_X86:
        with pytest.raises(KeyboardInterrupt):
            recorded.greedy(prompts_of((42,)), 2)
        assert interrupted
        assert not team_of(2)._owners  # whoever is asked for something has one


def test_what_else_reads_hidden_states(tmp_path: Path, backend: CountedBackend) -> None:
    """What an embedding or the logprobs of a prompt keep of a step is not overwritten by the next one."""
    WIDE.make(tmp_path)

    def run(eager: bool) -> list[Answer]:
        found = driver(tmp_path, eager, scheduler={"max_num_batched_tokens": 48})
        requests = []
        for i, prompt in enumerate(prompts_of((90, 100, 80, 47, 110, 70))):
            pooling = PoolingParams(type=("mean", "cls", "last")[i // 2]) if i % 2 else None
            params = SamplingParams(temperature=0.0, max_tokens=1) if pooling else ANSWER
            requests.append(
                EngineRequest(
                    request_id=str(i), prompt_token_ids=prompt, sampling_params=params, seed=0, pooling=pooling
                )
            )
        return found.run(requests)

    for expected, answer in zip(run(True), run(False), strict=True):
        assert answer.token_ids == expected.token_ids
        assert answer.prompt_logprobs == expected.prompt_logprobs
        assert (answer.embedding is None) == (expected.embedding is None)
        assert answer.embedding is None or torch.equal(answer.embedding, expected.embedding)
    assert backend.prompts_replayed or not IS_X86
