"""The caches of a fleet, as they come and go: named actors of a Ray cluster, or caches that the caller lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from raydix.schemas import CacheUnavailable, InvalidRequest
from raydix.schemas.shown import brief

logger = logging.getLogger(__name__)


class CacheSource(NamedTuple):
    """A cache of a directory."""

    cache: Any  # the argument of `PrefixCacheClient`
    identity: Any  # A cache of the same name that was started later has another identity.


class CacheDirectory(Protocol):
    """Lists the caches of a fleet."""

    async def look(self) -> dict[str, CacheSource]:
        """Return the caches that exist now, by name.

        Raises:
            CacheUnavailable: no Ray cluster runs.
        """


class ListedCaches:
    """The caches of a dict, which the caller may change at any time."""

    def __init__(self, caches: Mapping[str, Any]) -> None:
        self._caches = caches

    async def look(self) -> dict[str, CacheSource]:
        """Return the caches in the dict."""
        return {name: CacheSource(cache, id(cache)) for name, cache in self._caches.items()}

    def __str__(self) -> str:
        return "the given dict"


class NamedCaches:
    """The cache actors of a Ray namespace with names that match a pattern.

    Ray's control service lists them. While it does not answer, as while it restarts, the last list stays.
    """

    def __init__(self, pattern: str, namespace: str) -> None:
        self._pattern = pattern
        self._namespace = namespace
        self._found: dict[str, CacheSource] = {}

    async def look(self) -> dict[str, CacheSource]:
        """Return the running caches. Ray is asked in another thread, as it may take long to answer.

        Raises:
            CacheUnavailable: this process is in no Ray cluster, and none runs.
        """
        from raydix.actors.cluster.deploy import find_caches

        try:
            caches = await asyncio.to_thread(find_caches, self._pattern, self._namespace)
        except CacheUnavailable:
            raise
        except Exception as error:  # Ray's errors for an unreachable control service have no common base
            logger.info("the caches %r could not be listed, the last list stays: %s", self._pattern, error)
            return self._found
        self._found = {name: CacheSource(handle, handle) for name, handle in caches.items()}
        return self._found

    def __str__(self) -> str:
        return f"{self._pattern!r} in namespace {self._namespace!r}"


def directory_of(caches: Any, namespace: str) -> ListedCaches | NamedCaches:
    """Return the directory of caches that are given by a pattern of names, or as a dict.

    Raises:
        InvalidRequest: they are given in another way.
    """
    if isinstance(caches, str) and caches:
        if not isinstance(namespace, str) or not namespace:
            raise InvalidRequest(f"namespace must be a text of at least one character, not {brief(namespace)}")
        return NamedCaches(caches, namespace)
    if isinstance(caches, Mapping):
        return ListedCaches(caches)
    raise InvalidRequest(
        f'caches must be a pattern of names, such as "chat-*", or a dict of caches by name, not {brief(caches)}'
    )
