"""What every client of an OpenAI-compatible server needs: where its API is, and what its errors say."""

from __future__ import annotations

import json


def base_url_of(url: str) -> str:
    """With scheme and the path /v1, however the user wrote it."""
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    return url if url.endswith("/v1") else f"{url}/v1"


def error_message(status: int, body: bytes) -> str:
    """One line from an error response, OpenAI-shaped or not."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
    return f"HTTP {status}: {' '.join(text.split())}"
