"""Structured output: what an answer must look like, and how the sampler is held to it."""

from .spec import GrammarKind, GrammarSpec

__all__ = ["GrammarKind", "GrammarSpec"]
