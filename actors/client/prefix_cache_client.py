"""`PrefixCacheClient`: what schedulers and workers hold to use a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydix.actors.client.lease_verbs import CacheVerbs
from raydix.actors.sessions.watched_actor import check_watchable, warn_if_unwatched, watched_self
from raydix.schemas import InvalidRequest

if TYPE_CHECKING:
    from raydix.actors.transport.transport import Transport


class PrefixCacheClient(CacheVerbs):
    """One session with a cache: the verbs, and the leases it takes.

    Making one does no I/O and needs no running loop. Its first verb, `await open()` or `async with` opens the session
    on the loop that runs then, and the client stays on that loop. Requests of one tick travel in one message.

    Args:
        cache: the handle of a cache actor, the name of one (in the namespace of `start_cache`), or a
            `LocalPrefixCache`. By its name a client follows a cache that was shut down and started anew, as it does
            one that restarts; a handle is one cache's for good.
        owner: who this is, for people: shown in logs. None: host and process. Or the handle of an actor with the mixin
            `WatchedActor`: when it dies, what this client holds is freed at once. Inside such an actor that is the
            actor itself, unless another is named. The cache keeps a named one's handle until this client closes.
            Inside another actor, opening a client logs once how long its slots stay held if the actor is killed.

    Raises:
        InvalidRequest: the owner is an actor that cannot be watched.
    """

    def __init__(self, cache: Any, *, owner: Any = None) -> None:
        named = owner if owner is not None and not isinstance(owner, str) else None
        if named is not None:
            check_watchable(named)
        super().__init__(None if named is not None else owner)
        self._cache = cache
        self._named_owner = named

    def _own_life_path(self) -> str | None:
        return super()._own_life_path() if self._named_owner is None else None  # another's death is what counts

    async def _open(self) -> None:
        await super()._open()
        if self._named_owner is None and not isinstance(self._cache, CacheVerbs):
            warn_if_unwatched(self._config.leases)

    def _make_transport(self) -> Transport:
        if isinstance(self._cache, CacheVerbs):
            return self._cache._make_transport()
        from raydix.actors.deploy import check_handle, connect
        from raydix.actors.transport.ray_transport import RayTransport

        if isinstance(self._cache, str):
            return RayTransport(connect(self._cache), self._named_owner or watched_self(), by_name=True)
        if not hasattr(self._cache, "_actor_id"):
            raise InvalidRequest(
                f"a cache is an actor handle, a name or a LocalPrefixCache, not {type(self._cache).__name__}"
            )
        check_handle(self._cache)
        return RayTransport(self._cache, self._named_owner or watched_self())
