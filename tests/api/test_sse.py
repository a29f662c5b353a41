"""How an event looks on the wire."""

from __future__ import annotations

import json
import sys

import msgspec

from quire.cluster.api.sse import event


class Payload(msgspec.Struct):
    text: str


def test_an_event_is_one_line_to_every_reader() -> None:
    """Also to those that end lines where `str.splitlines` does, like httpx, whatever a model writes."""
    ends = [chr(code) for code in range(sys.maxunicode + 1) if len(f"a{chr(code)}b".splitlines()) > 1]
    assert {"\n", "\r", "\x85", "\u2028", "\u2029"} <= set(ends)
    text = "".join(f"é{end}日" for end in ends)
    line, nothing = event(Payload(text)).decode().splitlines()
    assert nothing == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
    assert event(Payload("é日")) == 'data: {"text":"é日"}\n\n'.encode()  # all else is sent as it is
