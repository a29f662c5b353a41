"""What one HTTP request may hold. The configuration sets it (`api:`, with a description of each)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What one HTTP request may hold."""

    max_body_bytes: int = 8 << 20
    request_templates: bool = True  # whether requests may bring a chat_template
    max_tokenize_chars: int = 1 << 20  # of a text for /tokenize, which need not fit a context
    max_choices: int = 256  # prompts x n
    max_inputs: int = 2048  # of /v1/embeddings
    max_messages: int = 4096
    max_stop_strings: int = 16
    max_logit_bias: int = 300
