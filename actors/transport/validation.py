"""Messages as a client makes and takes them: what is wrong with them is told in its caller's terms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from raydix.schemas import CacheError, InvalidRequest, Message
from raydix.schemas.message import Malformed, first_fault, validated
from raydix.schemas.shown import brief

M = TypeVar("M", bound=Message)

_MOST_SECONDS = 10**9  # thirty years: Ray and the kernel count in 64 bits of smaller units


def make_request(model: type[M], **fields: Any) -> M:
    """A request, validated."""
    return make_checked(partial(validated, model), fields)


def make_checked(make: Callable[..., M], *values: Any) -> M:
    """A request that a validating function makes of these."""
    try:
        return make(*values)
    except ValidationError as error:
        raise InvalidRequest(first_fault(error)) from None


def checked_message(model: type[M], message: object) -> M:
    """What a call brought, if it is what the call takes.

    Raises:
        InvalidRequest: it is not.
    """
    if isinstance(message, model):
        return message
    if isinstance(message, Malformed):
        raise InvalidRequest(str(message))
    raise InvalidRequest(f"this call takes a {model.__name__}, not {type(message).__name__}")


def checked_seconds(given: object) -> float:
    """A duration that a call brought, if it is one.

    Raises:
        InvalidRequest: it is not.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= _MOST_SECONDS:
        return given
    raise InvalidRequest(f"this call takes a finite number of seconds, not {brief(given)}; at most {_MOST_SECONDS:,}")


def checked_response(model: type[M], response: object) -> M:
    """The response, if it is of the model that was due."""
    if not isinstance(response, model):
        raise CacheError(f"the cache answered {type(response).__name__} where {model.__name__} was due")
    return response
