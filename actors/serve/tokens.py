"""`token_ids`: finds the tokens of a Ray Serve request that carries their ids. For `RaydixRequestRouter`."""

from __future__ import annotations

from typing import Any

from raydix.schemas.engine_namespace import CacheNamespace

_NAMESPACE_PARTS = CacheNamespace._fields


def token_ids(request: Any) -> tuple[Any, CacheNamespace] | None:
    """Return the token ids of a call such as `handle.generate.remote(token_ids, lora_id=...)`, and its namespace.

    The ids are the argument `token_ids`, or the first positional argument: a list, an array or a `TokenIds`. The
    namespace is made of the arguments `extra_key`, `lora_id` and `cache_salt`. A first argument that is a dict, such as
    a JSON body that was read already, is taken as arguments.

    An HTTP request that comes from Serve's proxy gives None: the proxy chooses the replica before it reads the body.
    For HTTP, put a deployment without a model in front: it reads the body, and calls the model by its handle.

    Args:
        request: the `PendingRequest` of Ray Serve.
    """
    given = dict(request.kwargs)
    first = request.args[0] if request.args else None
    if isinstance(first, dict):
        given = first | given
    elif first is not None:
        given.setdefault("token_ids", first)
    tokens = given.get("token_ids")
    if tokens is None or isinstance(tokens, (str, bytes)) or not hasattr(tokens, "__len__"):
        return None
    return tokens, CacheNamespace(**{name: given.get(name) for name in _NAMESPACE_PARTS})
