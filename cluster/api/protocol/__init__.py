"""Requests of the OpenAI API as Quire takes them (its extensions are vLLM's).

Types are checked here and strictly ("16" is not 16); ranges by `SamplingParams`. A field that is absent or null takes
the default of the model's authors, where they advise one, else OpenAI's.
"""

from .chat import ChatCompletionRequest
from .completions import CompletionRequest
from .embeddings import EmbeddingRequest
from .responses import ResponsesRequest

__all__ = ["ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest", "ResponsesRequest"]
