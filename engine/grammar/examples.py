"""A short text for a regular expression. Where an expression may begin anywhere in a text, one has to know what to say:
the characters allowed do not tell.
"""

from __future__ import annotations

import re
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_CHARS = 256


def example(pattern: str) -> str | None:
    """A text that the expression finds, or nearly; None where its syntax is not Python's. It is tried, not trusted."""
    try:
        text = _of_sequence(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError, _UnknownError):
        return None
    return text if len(text) <= MAX_CHARS else None


class _UnknownError(Exception):
    pass


def _of_sequence(items: Any) -> str:
    text = ""
    for kind, argument in items:
        text += _of_item(kind, argument)
        if len(text) > MAX_CHARS:
            raise _UnknownError
    return text


def _of_item(kind: Any, argument: Any) -> str:
    if kind is constants.LITERAL:
        return chr(int(argument))
    if kind is constants.NOT_LITERAL:
        return "b" if argument == ord("a") else "a"
    if kind is constants.ANY:
        return "a"
    if kind is constants.AT:
        return ""
    if kind is constants.IN:
        return _of_set(argument)
    if kind is constants.BRANCH:
        return min((_of_sequence(branch) for branch in argument[1]), key=len)
    if kind is constants.SUBPATTERN:
        return _of_sequence(argument[3])
    if kind in (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT):
        least, _, inside = argument
        if least > MAX_CHARS:
            raise _UnknownError
        return _of_sequence(inside) * int(least)
    raise _UnknownError


def _of_set(members: Any) -> str:
    if members[0][0] is constants.NEGATE:
        matches = re.compile("[^" + "".join(_member(each) for each in members[1:]) + "]")
        return next((char for char in "a0 -_xA." if matches.match(char)), "~")
    kind, argument = members[0]
    if kind is constants.LITERAL:
        return chr(int(argument))
    if kind is constants.RANGE:
        return chr(int(argument[0]))
    return "0" if argument is constants.CATEGORY_DIGIT else " " if argument is constants.CATEGORY_SPACE else "a"


def _member(member: Any) -> str:
    kind, argument = member
    if kind is constants.LITERAL:
        return re.escape(chr(argument))
    if kind is constants.RANGE:
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    return {constants.CATEGORY_DIGIT: r"\d", constants.CATEGORY_SPACE: r"\s"}.get(argument, r"\w")
