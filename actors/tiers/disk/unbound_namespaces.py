"""`UnboundNamespaces`: the namespaces of which a disk keeps nothing, as no model is bound to them."""

from __future__ import annotations

from collections.abc import Callable

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver

_MOST = 64  # namespaces that are remembered


class UnboundNamespaces(RequestObserver):
    """Observes the first tier's cache, and remembers the last namespaces in which pages were published.

    Args:
        has_models: returns whether models are bound to a namespace now.
    """

    def __init__(self, has_models: Callable[[str | None], bool]) -> None:
        self._has_models = has_models
        self._latest: dict[str | None, None] = {}  # the oldest first

    def count(self) -> int:
        """Return how many of the remembered namespaces have no models now."""
        return sum(not self._has_models(namespace) for namespace in self._latest)

    def published(self, lease: LeaseRecord) -> None:
        """Remember the lease's namespace. It costs one look-up, unless the namespace is new."""
        namespace = lease.key.extra_key
        if namespace not in self._latest:
            self._latest[namespace] = None
            if len(self._latest) > _MOST:
                del self._latest[next(iter(self._latest))]

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Forget retired namespaces, until pages are published there again."""
        for namespace in [namespace for namespace in self._latest if is_meant(namespace)]:
            del self._latest[namespace]
