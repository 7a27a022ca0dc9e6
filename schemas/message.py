"""The base of every message: a frozen pydantic model that pickles in a few microseconds."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """A request or a response: immutable, no unknown fields, validated where it is made and again where it arrives.

    Pickling keeps the field values alone, in order. What breaks its model's rules is unpickled as `Malformed`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (type(self), *self.__dict__.values())


class Answer(Message):
    """What the cache says: its client takes it as it is, without validating it again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (type(self), *self.__dict__.values())


class Malformed(Message):
    """What arrives in place of a message that was not made as its model wants it."""

    model: str
    fault: str

    def __str__(self) -> str:
        return f"malformed {self.model}: {self.fault}"


def first_fault(error: ValidationError) -> str:
    """What is wrong first, and where."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    fault = first["msg"].removeprefix("Value error, ")
    return f"{where}: {fault}" if where else fault


def restore(model: type[M], *values: Any) -> M:
    """A message of the values of all its fields, in order, which are taken as they are."""
    message = model.__new__(model)
    names, are_set = _fields(model)
    _set(message, "__dict__", dict(zip(names, values, strict=True)))
    _set(message, "__pydantic_fields_set__", are_set)
    _set(message, "__pydantic_extra__", None)
    _set(message, "__pydantic_private__", None)
    return message


_set = object.__setattr__


@cache
def _fields(model: type[Message]) -> tuple[tuple[str, ...], set[str]]:
    """A model's fields in order, and as the set that all its messages share."""
    return tuple(model.model_fields), set(model.model_fields)


def _receive(model: type[Message], *values: Any) -> Message:
    """The message, validated."""
    try:
        fields = dict(zip(_fields(model)[0], values, strict=True))
        message: Message = model.__pydantic_validator__.validate_python(fields)
    except ValidationError as error:
        return Malformed(model=model.__name__, fault=first_fault(error))
    except Exception as error:  # its fields are not those of this version, or of types that no validator expects
        return Malformed(model=model.__name__, fault=f"{type(error).__name__}: {error}")
    return message
