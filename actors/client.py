"""`PrefixCacheClient`: what schedulers and workers hold to use a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydix.actors.verbs import CacheVerbs
from raydix.schemas import InvalidRequest

if TYPE_CHECKING:
    from raydix.actors.transport import Transport


class PrefixCacheClient(CacheVerbs):
    """One session with a cache: the verbs, and the leases it takes.

    Making one does no I/O and needs no running loop. Its first verb, `await open()` or `async with` opens the session
    on the loop that runs then, and the client stays on that loop. Requests of one tick travel in one message.

    Args:
        cache: the handle of a cache actor, the name of one (in the namespace of `start_cache`), or a
            `LocalPrefixCache`.
        owner: who this is, for people: shown in statistics and errors. None: host and process.
    """

    def __init__(self, cache: Any, *, owner: str | None = None) -> None:
        super().__init__(owner)
        self._cache = cache

    def _make_transport(self) -> Transport:
        if isinstance(self._cache, CacheVerbs):
            return self._cache._make_transport()
        from raydix.actors.deploy import connect
        from raydix.actors.ray_transport import RayTransport

        if isinstance(self._cache, str):
            return RayTransport(connect(self._cache))
        if not hasattr(self._cache, "_actor_id"):
            raise InvalidRequest(
                f"a cache is an actor handle, a name or a LocalPrefixCache, not {type(self._cache).__name__}"
            )
        return RayTransport(self._cache)
