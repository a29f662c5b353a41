"""Quire: an LLM serving cluster on Ray."""

__version__ = "0.1.0"
