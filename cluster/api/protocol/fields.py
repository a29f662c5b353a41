"""What the models of all requests are made of: strictness, bounds, and errors that read well."""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("quire", message)


def without_nulls(value: object) -> object:
    """An object without the fields that are null: they count as not given, and clients send them of fields that nobody
    here knows."""
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def check_length(value: list[Any] | dict[Any, Any], limit: int) -> None:
    if len(value) > limit:
        raise PydanticCustomError("too_many", f"must hold at most {limit} entries, got {len(value)}")


def at_most(limit: int) -> BeforeValidator:
    """Checks the length of a list before pydantic looks at its entries."""

    def check(value: object) -> object:
        if isinstance(value, list):
            check_length(value, limit)
        return value

    return BeforeValidator(check)


class StrictModel(BaseModel):
    """Refuses wrong types and unknown fields. pydantic makes a record of every mistake that it finds,
    so everything that repeats has a bound: a large body must not hold a million of them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def given(self) -> dict[str, Any]:
        """The fields that have values, by the names that requests know them by. Values are not copied."""
        values = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return {
            name: value.given() if isinstance(value, StrictModel) else value
            for name, value in values.items()
            if value is not None
        }

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: object) -> object:
        """With more fields than there are, the first so many hold an unknown one: they are enough to be refused."""
        if isinstance(data, dict) and len(data) > len(cls.model_fields):
            return dict(islice(data.items(), len(cls.model_fields) + 1))
        return data
