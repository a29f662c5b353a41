"""`quire bench`: load a server and measure it, or measure the engine alone."""

from typing import Literal

Endpoint = Literal["completions", "chat"]
