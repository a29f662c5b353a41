"""A quantized checkpoint stays packed on a GPU, and answers as its numbers do. In Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import interpreted


def test_whole_models() -> None:
    found = interpreted(Path(__file__).with_name("packed_on_triton.py"))
    assert {name: each["packed"] for name, each in found.items()} == {"awq": 4, "gpt-oss": 4}
    for each in found.values():
        assert each["tokens"] == each["expected"]
        assert len({*each["tokens"][0], *each["tokens"][1]}) > 2
