"""The base of every message: a frozen pydantic model that pickles in a few microseconds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Message(BaseModel):
    """A request or a response: immutable, no unknown fields, validated where it is made and again where it arrives.

    Pickling keeps the field values alone, in order. What breaks its model's rules is unpickled as `Malformed`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), *self.__dict__.values())


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


def _restore(model: type[Message], *values: Any) -> Message:
    """The message, validated: as quick as setting its fields by hand."""
    try:
        fields = dict(zip(model.__pydantic_fields__, values, strict=True))
        message: Message = model.__pydantic_validator__.validate_python(fields)
    except ValidationError as error:
        return Malformed(model=model.__name__, fault=first_fault(error))
    except Exception as error:  # its fields are not those of this version, or of types that no validator expects
        return Malformed(model=model.__name__, fault=f"{type(error).__name__}: {error}")
    return message
