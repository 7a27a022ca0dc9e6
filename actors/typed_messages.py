"""Messages as a client makes and takes them: what is wrong with them is told in its caller's terms."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from raydix.schemas import CacheError, InvalidRequest, Message

M = TypeVar("M", bound=Message)


def build(model: type[M], **fields: Any) -> M:
    """A request, validated here and nowhere else."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def expect(model: type[M], response: Message) -> M:
    """The response, if it is of the model that was due."""
    if not isinstance(response, model):
        raise CacheError(f"the cache answered {type(response).__name__} where {model.__name__} was due")
    return response
