"""The grammar of an answer as it travels with a request."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must match, from its first token to its last.

    `source` is, by kind: `json_schema` the schema as JSON; `json_object` nothing; `regex` an expression that the whole
    answer matches; `choice` a JSON list of the strings to choose from; `lark` a grammar in llguidance's Lark dialect
    (with `%json {...}` and special tokens as `<|name|>`, or `<[5]>` by id); `ebnf` a GBNF or Lark grammar, as users
    give either. `param` is the field under which the user gave it, for errors.
    """

    kind: GrammarKind
    source: str = ""
    param: str = "structured_outputs"
