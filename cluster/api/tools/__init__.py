"""Tool calls in the text of an answer: one small parser per format that models were trained to write.

A parser is a function of the text alone. Fed with pieces it finds what it finds in the whole, so that a stream joins
to the answer that is not streamed, and goes on at another engine as if nothing had happened.
"""

from .events import Arguments, CallStart, Content, Event, IncrementalParser, Parser, Reasoning
from .formats import FORMATS, ToolFormat, detect_format
from .tool_set import Function, ToolSet

__all__ = [
    "FORMATS",
    "Arguments",
    "CallStart",
    "Content",
    "Event",
    "Function",
    "IncrementalParser",
    "Parser",
    "Reasoning",
    "ToolFormat",
    "ToolSet",
    "detect_format",
]
