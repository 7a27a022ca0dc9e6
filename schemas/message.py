"""The base of every message: a frozen pydantic model that pickles in a few microseconds."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from operator import index
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from raydix.schemas.shown import shown

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """A request or a response: immutable, no unknown fields, validated where it is made and again where it arrives.

    Pickling keeps the field values alone, in order. What breaks its model's rules is unpickled as `Malformed`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (type(self), *self.__dict__.values())


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
    where = ".".join([shown(str(each)) for each in first["loc"]])
    fault = shown(first["msg"].removeprefix("Value error, "))
    return f"{where}: {fault}" if where else fault


def validated(model: type[M], fields: dict[str, Any]) -> M:
    """What the constructor makes of these; where it wants an int, what stands for one, as numpy's do, is taken as it.

    Raises:
        ValidationError: the constructor's.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        ints = _ints_meant(error)
        if not ints:
            raise
    return model(**fields | ints)


def _ints_meant(error: ValidationError) -> dict[str, int]:
    """The ints that those fields stand for which were refused as none."""
    ints: dict[str, int] = {}
    for fault in error.errors(include_url=False):
        if fault["type"] == "int_type" and not isinstance(fault["input"], bool):
            with suppress(Exception):  # whatever a value raises that is asked to be a number
                ints[str(fault["loc"][0])] = index(fault["input"])
    return ints


def restore(model: type[M], *values: Any) -> M:
    """A message of the values of all its fields, in order, which are taken as they are.

    Raises:
        ValueError: they are more or fewer, as who made it runs another version of this package.
    """
    try:
        return assemble(model, dict(zip(_names(model), values, strict=True)))
    except ValueError:
        here = len(_names(model))
        raise ValueError(
            f"a {model.__name__} has {here} fields here, {len(values)} where it was made: the versions of raydix differ"
        ) from None


def assemble(model: type[M], fields: dict[str, Any]) -> M:
    """A message of all its fields, in order, which are taken as they are. The dict is the message's from then on."""
    message = _new(model)
    _set_fields(message, fields)
    _set_names(message, _name_sets[model])
    _set_extra(message, None)
    _set_private(message, None)
    return message


_new = object.__new__
_set_fields, _set_names, _set_extra, _set_private = (  # what a model's instances have, and what it does not let be set
    vars(BaseModel)[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


class _NameSets(dict[type[Message], set[str]]):
    """By model, the set of its fields that all its messages share."""

    def __missing__(self, model: type[Message]) -> set[str]:
        names = self[model] = set(model.model_fields)
        return names


_name_sets = _NameSets()


@cache
def _names(model: type[Message]) -> tuple[str, ...]:
    """A model's fields in order."""
    return tuple(model.model_fields)


def refused(model: type[Message], error: Exception) -> Malformed:
    """What stands for a message that could not be made of what arrived."""
    fault = first_fault(error) if isinstance(error, ValidationError) else shown(f"{type(error).__name__}: {error}")
    return Malformed(model=model.__name__, fault=fault)


def receive(model: type[Message], *values: Any) -> Message:
    """A message that has arrived, of the values of all its fields, validated; `Malformed` if it cannot be made."""
    try:
        fields = dict(zip(_names(model), values, strict=True))
        message: Message = model.__pydantic_validator__.validate_python(fields)
    except Exception as error:  # its fields are not those of this version, or of types that no validator expects
        return refused(model, error)
    return message
