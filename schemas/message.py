"""The base of every message: a frozen pydantic model that pickles in a few microseconds."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """A request or a response: immutable, no unknown fields, validated where it is made and nowhere else.

    Pickling keeps the field values alone, in order, and unpickling restores them without validating again: both ends
    run the same version of this package, and the actor re-checks what it relies on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (type(self), *self.__dict__.values())


def restore(model: type[M], *values: Any) -> M:
    """A message of all its fields' values, in order, which are taken as they are."""
    message = model.__new__(model)
    fields, are_set = _fields(model)
    _set(message, "__dict__", dict(zip(fields, values, strict=True)))
    _set(message, "__pydantic_fields_set__", are_set)
    _set(message, "__pydantic_extra__", None)
    _set(message, "__pydantic_private__", None)
    return message


_set = object.__setattr__


@cache
def _fields(model: type[Message]) -> tuple[tuple[str, ...], set[str]]:
    """A model's fields in order, and as the set that all its messages share."""
    return tuple(model.model_fields), set(model.model_fields)
