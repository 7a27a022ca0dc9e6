"""`UnboundNamespaces`: the namespaces of which a disk keeps nothing, as no model is bound to them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import unframe_namespace
from raydix.schemas.shown import brief

logger = logging.getLogger(__name__)

_MOST = 64  # namespaces that are remembered


class UnboundNamespaces(RequestObserver):
    """Observes the first tier's cache, and remembers the last namespaces in which pages were published.

    It warns once, when a client has published pages that are not kept.

    Args:
        has_models: returns whether models are bound to a namespace now.
    """

    def __init__(self, has_models: Callable[[str | None], bool]) -> None:
        self._has_models = has_models
        self._latest: dict[str | None, None] = {}  # the oldest first
        self._has_warned = False

    def count(self) -> int:
        """Return how many of the remembered namespaces have no models now."""
        return sum(not self._has_models(namespace) for namespace in self._latest)

    def published(self, lease: LeaseRecord) -> None:
        """Remember the lease's namespace. It costs two look-ups, unless the namespace is new."""
        namespace = lease.key.extra_key
        if namespace not in self._latest:
            self._latest[namespace] = None
            if len(self._latest) > _MOST:
                del self._latest[next(iter(self._latest))]
        if not self._has_warned and lease.session_id != TIERS and not self._has_models(namespace):
            self._has_warned = True
            logger.warning(
                "no KV of %s is kept on the disk, as no model is bound to it: bind_model, or name the base of "
                'all sessions with CacheConfig(fingerprint="...")',
                _named(namespace),
            )

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Forget retired namespaces, until pages are published there again."""
        for namespace in [namespace for namespace in self._latest if is_meant(namespace)]:
            del self._latest[namespace]


def _named(namespace: str | None) -> str:
    """Return a namespace in words, without its salt."""
    if namespace is None:
        return "the default namespace"
    try:
        extra_key, lora_id, cache_salt = unframe_namespace(namespace)
    except ValueError:  # a caller of the core made it
        return f"namespace {brief(namespace)}"
    named = {"extra_key": extra_key, "lora_id": lora_id}
    parts = [f"{name}={brief(text)}" for name, text in named.items() if text is not None]
    return f"the namespace with {', '.join([*parts, *['a cache_salt'] * (cache_salt is not None)])}"
