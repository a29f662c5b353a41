"""What every client of a server needs: where its API is, what its errors say, and where to print."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 200


def base_url_of(url: str) -> str:
    """With scheme and the path /v1, however the user wrote it."""
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    return url if url.endswith("/v1") else f"{url}/v1"


def wide_console() -> Console:
    """A console that cuts nothing where its output is not a terminal, but goes into a file or another program."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=shutil.get_terminal_size((_WIDE, 0)).columns)


def error_message(status: int, body: bytes) -> str:
    """One line from an error response, OpenAI-shaped or not."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
    return f"HTTP {status}: {' '.join(text.split())}"
