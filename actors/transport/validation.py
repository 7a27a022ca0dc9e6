"""Checks of messages and of callers' arguments: their errors name the argument in the caller's terms."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from operator import index
from typing import Any, TypeVar

from pydantic import ValidationError

from raydix.schemas import CacheConfig, CacheError, InvalidRequest, Message, TokenIds, frame_namespace
from raydix.schemas.cache_name import check_cache_name
from raydix.schemas.message import Malformed, first_fault
from raydix.schemas.shown import brief

M = TypeVar("M", bound=Message)

_MOST_SECONDS = 10**9  # thirty years: Ray and the kernel count in 64 bits of smaller units


def make_request(model: type[M], **fields: Any) -> M:
    """Return a request of a client. A value that stands for an int, as numpy's do, is taken as that int.

    Raises:
        InvalidRequest: a field is wrong; the message names it.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        ints = _meant_ints(error)
        if not ints:
            raise InvalidRequest(first_fault(error)) from None
    return make_request(model, **fields | ints)


def unknown_tier(name: str, tiers: Iterable[str]) -> InvalidRequest:
    """Return the error for a tier that a cache does not have; it names those there are."""
    return InvalidRequest(f"tier must be one of {', '.join(map(repr, tiers))}, not {brief(name)}")


def _meant_ints(error: ValidationError) -> dict[str, int]:
    """Return the ints that the values stand for which were refused because their type is not int."""
    ints: dict[str, int] = {}
    for fault in error.errors(include_url=False):
        if fault["type"] == "int_type" and not isinstance(fault["input"], (bool, int)):
            with suppress(Exception):  # a value may raise anything where a number is asked of it
                ints[str(fault["loc"][0])] = index(fault["input"])
    return ints


def checked_message(model: type[M], message: object) -> M:
    """Return the message that a call brought.

    Raises:
        InvalidRequest: it is malformed, or of another model.
    """
    if isinstance(message, model):
        return message
    if isinstance(message, Malformed):
        raise InvalidRequest(str(message))
    raise InvalidRequest(f"this call takes a {model.__name__}, not {type(message).__name__}")


def checked_seconds(given: object) -> float:
    """Return a number of seconds that a call brought.

    Raises:
        InvalidRequest: it is no finite number of at least 0, or too large.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= _MOST_SECONDS:
        return given
    raise InvalidRequest(f"this call takes a finite number of seconds, not {brief(given)}; at most {_MOST_SECONDS:,}")


def checked_response(model: type[M], response: object) -> M:
    """Return a response; CacheError if it is of another model."""
    if not isinstance(response, model):
        raise CacheError(f"the cache answered {type(response).__name__} where {model.__name__} was due")
    return response


def checked_config(config: Any) -> CacheConfig:
    """Return a configuration as it is; InvalidRequest if it is none."""
    if not isinstance(config, CacheConfig):
        raise InvalidRequest(f"a cache takes a CacheConfig, not {type(config).__name__}")
    return config


def checked_name(name: Any) -> str:
    """Return a cache's name as it is; InvalidRequest if a cache cannot be called so."""
    try:
        return check_cache_name(name)
    except ValueError as error:
        raise InvalidRequest(f"a cache's name {error}") from None


def checked_token_ids(tokens: Any) -> TokenIds:
    """Return token ids, or none of them, as a message carries them; InvalidRequest unless they are a row of ids."""
    try:
        return TokenIds.pack(tokens)
    except ValueError as error:
        raise InvalidRequest(f"tokens: {error}") from None


def checked_tokens(tokens: Any) -> TokenIds:
    """Return token ids as a message carries them; InvalidRequest unless they are a row of at least one id."""
    packed = checked_token_ids(tokens)
    if not len(packed):
        raise InvalidRequest("tokens: at least one token id is needed")
    return packed


def checked_count(num_tokens: Any, name: str = "num_tokens", least: int = 1) -> int:
    """Return a number of tokens as a plain int; InvalidRequest if it is none, or less than `least`."""
    with suppress(Exception):  # a value may raise anything where a number is asked of it
        if not isinstance(num_tokens, bool) and index(num_tokens) >= least:
            return index(num_tokens)
    kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
    raise InvalidRequest(f"{name} must be {kind}, not {brief(num_tokens)}")


def checked_namespace(extra_key: str | None, lora_id: str | None, cache_salt: str | None) -> str | None:
    """Return the one name by which a cache knows a namespace; InvalidRequest for parts that it cannot have."""
    if extra_key is lora_id is cache_salt is None:
        return None
    try:
        return frame_namespace(extra_key, lora_id, cache_salt)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def check_watchable(handle: Any) -> None:
    """Raise InvalidRequest unless an actor can be watched: parking would block one that is not made for it."""
    if not hasattr(handle, "raydix_park") or getattr(handle, "_ray_allow_out_of_order_execution", None) is False:
        raise InvalidRequest("an owner is a name for people, or the handle of an actor with the mixin WatchedActor")
