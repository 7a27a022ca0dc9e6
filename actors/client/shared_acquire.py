"""`SharedAcquire`: the checked arguments of one `acquire` that is sent to several caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydix.actors.transport.validation import checked_namespace, checked_tokens, make_request
from raydix.schemas import AcquireRequest

if TYPE_CHECKING:
    from raydix.actors.client.lease import PendingLease
    from raydix.actors.client.prefix_cache_client import PrefixCacheClient


class SharedAcquire:
    """The arguments of an `acquire`, checked and packed once, for the clients of several caches.

    Args:
        tokens: as in `PrefixCacheClient.acquire`.
        options: the other arguments of `PrefixCacheClient.acquire`.

    Attributes:
        request: the arguments as a request. It is never sent: each client makes its own.
        namespace: the parts of the namespace, as arguments of a verb.

    Raises:
        InvalidRequest: an argument is wrong; the message names it.
    """

    def __init__(self, tokens: Any, **options: Any) -> None:
        self.namespace = {name: options.pop(name, None) for name in ("extra_key", "lora_id", "cache_salt")}
        packed, namespace = checked_tokens(tokens), checked_namespace(**self.namespace)
        self.request = make_request(AcquireRequest, lease_id="unsent", tokens=packed, namespace=namespace, **options)
        self._options = self.namespace | options

    @property
    def max_prefix_len(self) -> int:
        """The limit of the prefix; without one, the length of the prompt."""
        limit = self.request.max_prefix_len
        return len(self.request.tokens) if limit is None else limit

    def send(self, client: PrefixCacheClient, *, max_prefix_len: int | None, timeout_s: float | None) -> PendingLease:
        """Acquire a lease at the cache of a client, with another limit and another time than the request's."""
        changed = {"max_prefix_len": max_prefix_len, "timeout_s": timeout_s}
        return client.acquire(self.request.tokens, **self._options | changed)
