"""Typed errors. A user's mistake names its field; one place (the API) maps each class to an HTTP status."""

from __future__ import annotations

from typing import Literal


class QuireError(Exception):
    """Base of every error that Quire raises on purpose.

    `message` is written for the person who caused it: what was given, and what is allowed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequestError(QuireError):
    """A request that cannot work, refused before it is scheduled. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that this service does not serve."""

    def __init__(self, model: str, served: list[str]) -> None:
        super().__init__(
            f"The model {_short(model)} does not exist. Served here: {', '.join(served)}.", "model", "model_not_found"
        )


class ConfigError(QuireError):
    """A configuration that cannot work: the message names the key, the value and what is allowed."""


class OverloadedError(QuireError):
    """The queue is full. `retry_after_s` estimates when there will be room."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TenantShareError(OverloadedError):
    """The queue is full, and this tenant has its share of it, or more."""


class EngineError(QuireError):
    """The engine failed while it worked on a request: the request could not be completed."""


class EngineEndedError(EngineError):
    """The engine takes nothing in any more. That says nothing about the request: another engine can have it."""


class ExecutorError(QuireError):
    """A step could not be executed. The engine's requests can be run again.

    `cause`: a rank was lost (its process or node died), hung, or raised an exception.
    """

    def __init__(self, message: str, cause: Literal["lost", "hung", "raised"] = "raised") -> None:
        super().__init__(message)
        self.cause = cause


def _short(text: str, most: int = 200) -> str:
    """What a user wrote, quoted, but not a megabyte of it."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text)} characters)"
