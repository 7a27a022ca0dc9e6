"""What callers hand in, checked once, at the client's edge."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any

from raydix.schemas import CacheConfig, InvalidRequest, TokenIds, frame_namespace
from raydix.schemas.cache_name import check_cache_name
from raydix.schemas.shown import brief


def checked_config(config: Any) -> CacheConfig:
    """A configuration as it is; InvalidRequest if it is none."""
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
    """Return token ids as a message carries them, be there any or none; InvalidRequest unless they are a row of ids."""
    try:
        return TokenIds.pack(tokens)
    except ValueError as error:
        raise InvalidRequest(f"tokens: {error}") from None


def checked_tokens(tokens: Any) -> TokenIds:
    """Token ids as a message carries them; InvalidRequest unless that is what they are, one at least."""
    packed = checked_token_ids(tokens)
    if not len(packed):
        raise InvalidRequest("tokens: at least one token id is needed")
    return packed


def checked_count(num_tokens: Any, name: str = "num_tokens") -> int:
    """A number of tokens as a plain int; InvalidRequest if it is none, or less than 1."""
    with suppress(Exception):  # whatever a value raises that is asked to be a number
        if not isinstance(num_tokens, bool) and index(num_tokens) > 0:
            return index(num_tokens)
    raise InvalidRequest(f"{name} must be a positive integer, not {brief(num_tokens)}")


def checked_namespace(extra_key: str | None, lora_id: str | None, cache_salt: str | None) -> str | None:
    """The one name that a cache knows a namespace by; InvalidRequest for what cannot be part of one."""
    if extra_key is lora_id is cache_salt is None:
        return None
    try:
        return frame_namespace(extra_key, lora_id, cache_salt)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
