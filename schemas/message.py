"""The bases of all messages: of dataclasses, which every request needs, and of frozen pydantic models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from raydix.schemas.shown import shown

M = TypeVar("M", bound="Message")

MAX_COUNT = 2**62  # far more than any pool has; a larger count means the same, and would not fit into 64 bits
Count = Annotated[int, Field(ge=0, strict=True), AfterValidator(lambda count: min(count, MAX_COUNT))]


class Message:
    """A request or a response: without unknown fields, checked where it is made and where it arrives.

    Pickling keeps the values of the fields alone, in order. A request that breaks its rules arrives as `Malformed`.
    The most frequent messages are dataclasses; the others derive from `PydanticMessage`. All are frozen; those that
    `quick_message` makes, for type checkers alone.

    A request's class says how client and cache treat the request.

    Attributes:
        takes_slots: the request begins a lease or makes one grow: it is refused while the cache drains.
        is_always_queued: the request ends or gives up a lease: the client queues it even if the queue is full.
        token_field: the name of the field with the token ids, which can be long; None: there is none.
        traced_as: the client's method that gets a span for the request; None: there is none.
    """

    __slots__ = ()
    takes_slots: ClassVar[bool] = False
    is_always_queued: ClassVar[bool] = False
    token_field: ClassVar[str | None] = None
    traced_as: ClassVar[str | None] = None

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return tuple(cls.__slots__)

    @classmethod
    def from_values(cls, *values: Any) -> Self:
        """Return a message of the values of all its fields, in order.

        Raises:
            ValueError: there are more or fewer values than fields, or one is wrong.
        """
        return cls(**dict(zip(cls.field_names(), values, strict=True)))

    def _values(self) -> Iterable[Any]:
        return [getattr(self, name) for name in self.field_names()]

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (type(self), *self._values())


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def quick_message(model: type[M]) -> type[M]:
    """Make a class of messages a dataclass with slots, frozen for type checkers alone.

    A frozen dataclass assigns each field by a call, which takes six times as long. A request makes eight such messages.
    """
    return dataclass(slots=True)(model)


class Answer(Message):
    """A response. If it cannot be made again where it arrives, the call that waits for it fails."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (type(self), *self._values())


class PydanticMessage(Message, BaseModel):
    """A message that pydantic validates."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return tuple(cls.model_fields)

    def _values(self) -> Iterable[Any]:
        return self.__dict__.values()


class PydanticAnswer(Answer, PydanticMessage):
    """A response that pydantic validates."""


class Malformed(PydanticMessage):
    """The message that arrives in place of one that breaks the rules of its class."""

    model: str
    fault: str

    def __str__(self) -> str:
        return f"malformed {self.model}: {self.fault}"


@cache
def _rules_of(model: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """Return pydantic's validating function for each field of a dataclass."""
    config = ConfigDict(arbitrary_types_allowed=True)
    hints = get_type_hints(model, include_extras=True)
    return {name: TypeAdapter(hints[name], config=config).validator.validate_python for name in model.field_names()}


def apply_rule(message: Message, name: str) -> None:
    """Replace a field of a dataclass by the value that pydantic makes of it under the field's annotation.

    Raises:
        ValidationError: the value breaks the rules of the annotation.
    """
    model: Any = type(message)
    try:
        value = _rules_of(model)[name](getattr(message, name))
    except ValidationError as error:
        faults = [
            InitErrorDetails(
                type=fault["type"], loc=(name, *fault["loc"]), input=fault["input"], ctx=fault.get("ctx", {})
            )
            for fault in error.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data(model.__name__, faults, hide_input=True) from None
    setattr(message, name, value)


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a message, after the name of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join([shown(str(part)) for part in first["loc"]])
    fault = shown(first["msg"].removeprefix("Value error, "))
    return f"{where}: {fault}" if where else fault


def restore(model: type[M], *values: Any) -> M:
    """Return a response that has arrived, made of the values of all its fields, in order.

    Raises:
        ValueError: there are more or fewer values than fields, as the cache runs another version of this package.
    """
    if len(values) != (num_fields := len(model.field_names())):
        counts = f"a {model.__name__} has {num_fields} fields here, {len(values)} where it was made"
        raise ValueError(f"{counts}: the versions of raydix differ")
    return model.from_values(*values)


def receive(model: type[M], *values: Any) -> M | Malformed:
    """Return a request that has arrived, made of the values of all its fields and checked; else `Malformed`."""
    try:
        return model.from_values(*values)
    except Exception as error:  # Another version has other fields, and a type may be one that no check expects.
        return malformed(model, error)


def malformed(model: type[Message], error: Exception) -> Malformed:
    """Return the message in place of one that could not be made."""
    fault = first_fault(error) if isinstance(error, ValidationError) else shown(f"{type(error).__name__}: {error}")
    return Malformed(model=model.__name__, fault=fault)
