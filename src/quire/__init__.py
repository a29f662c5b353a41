"""Quire: an LLM serving cluster on Ray. The public face: `LLM` and `SamplingParams`, loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.grammar.request_fields import StructuredOutputsParams
    from quire.engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from quire.engine.pooling import PoolingParams
    from quire.engine.sampling_params import SamplingParams
    from quire.llm import LLM

__version__ = "0.1.0"

_HOMES = {
    "LLM": "quire.llm",
    "SamplingParams": "quire.engine.sampling_params",
    "BeamSearchParams": "quire.engine.beam_search",
    "PoolingParams": "quire.engine.pooling",
    "StructuredOutputsParams": "quire.engine.grammar.request_fields",
    "RequestOutput": "quire.engine.outputs",
    "EmbeddingOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that `import quire.engine` stays free of torch and Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
