"""The default model held to grammars offline: what it says parses, and does not depend on the batch."""

from __future__ import annotations

import json

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.errors import InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "inhabitants": {"type": "integer", "minimum": 1},
        "sights": {"type": "array", "items": {"type": "string"}, "minItems": 2},
    },
    "required": ["city", "inhabitants", "sights"],
}
PROMPT = "Paris as JSON:"


def params(max_tokens: int, temperature: float = 1.0, **fields: object) -> SamplingParams:
    outputs = StructuredOutputsParams(json=SCHEMA)
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=max_tokens, structured_outputs=outputs, **fields
    )


def test_answers_close_and_do_not_depend_on_the_batch() -> None:
    with LLM(max_model_len=256, num_threads=1, max_num_seqs=16) as llm:
        asked = [params(count, temperature) for count in range(22, 46, 3) for temperature in (0.0, 1.0)]
        free = SamplingParams(max_tokens=12, temperature=0)
        together = llm.generate([PROMPT] * len(asked) + [PROMPT], [*asked, free], use_tqdm=False)
        for output in together[:-1]:
            text = output.outputs[0].text
            jsonschema.validate(json.loads(text), SCHEMA)
        alone = [llm.generate(PROMPT, one, use_tqdm=False)[0] for one in [*asked[:3], free]]
        compared = [*together[:3], together[-1]]
        assert [one.outputs[0].token_ids for one in alone] == [one.outputs[0].token_ids for one in compared]
        logprobs = llm.generate(PROMPT, params(30, 0.0, logprobs=1), use_tqdm=False)[0].outputs[0].logprobs
        assert logprobs is not None
        assert (
            min(entry.rank for entry in logprobs[:1]) > 1
        )  # of the raw distribution: it would have said something else
        with pytest.raises(InvalidRequestError, match=r"max_tokens: 5 tokens are left .* needs 1\d\."):
            llm.generate(PROMPT, params(5), use_tqdm=False)
        assert llm.stats().num_used_blocks == 0
