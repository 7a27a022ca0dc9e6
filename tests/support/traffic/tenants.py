"""Random traffic of tenants over one `KVCache`. Grants and evictions are compared with `reference/tenants.py`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from support.reference.tenants import Shares

from raydix.cache_core import (
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.leases.kv_cache import KVCache

NAMESPACES = ("quiet", "noisy", "both", "rest", None)
SESSIONS = ("s0", "s1", "s2")


def make_cache(
    page_size: int, policy: str, with_states: bool = False, window_pages: int = 0, spares: bool = False
) -> KVCache:
    """40 pages, and so many with window slots: one tenant has a floor, one a cap, one both.

    Args:
        spares: whether of a victim that is longer than needed, the tail alone goes.
    """
    tenants = Tenants(
        [
            Tenant("quiet", "quiet", floor=12 * page_size),
            Tenant("noisy", "noisy", cap=18 * page_size),
            Tenant("both", "both", floor=8 * page_size, cap=12 * page_size),
        ]
    )
    allocator = TokenToKVPoolAllocator(40 * page_size, page_size)
    if window_pages:
        windows = SWATokenToKVPoolAllocator(40 * page_size, window_pages * page_size, page_size)
        return KVCache(RadixCache(page_size, 3, windows, eviction_policy=policy), windows, tenants=tenants)
    if not with_states:
        tree = RadixCache(page_size, token_to_kv_pool_allocator=allocator, eviction_policy=policy)
        if spares:
            tree.parts.full.least_spared = page_size
        return KVCache(tree, allocator, tenants=tenants)
    states = MambaPool(8)
    hybrid = MambaRadixCache(page_size, allocator, states, eviction_policy=policy)
    return KVCache(hybrid, allocator, tenants=tenants, states=states)


class TenantTraffic:
    """A cache and its tenants.

    Args:
        namespaces: the namespaces of the requests; one that is named more often is drawn more often.
        retiring: times in about 46 verbs that a namespace is retired.
        beside: times in about 46 verbs that windows or states alone are evicted.

    Attributes:
        done: how often each verb was called, how often it was refused, and how often evictions were compared.
    """

    def __init__(
        self,
        cache: KVCache,
        rng: random.Random,
        namespaces: Sequence[str | None] = NAMESPACES,
        retiring: float = 0.4,
        beside: float = 0,
    ) -> None:
        self.cache = cache
        self.rng = rng
        self._namespaces = namespaces
        self._weights = (13, 14, 2, 13, 1, 1, retiring, 0.3, 0.5, 0.4, 0.4, beside)
        self.done = Counter[str]()
        self.open: list[tuple[str, str]] = []  # lease id, session
        self.actor: Tenant | None = None  # tenant of the current verb
        self._next_id = 0
        self._take_pages, cache.pools.take_pages = cache.pools.take_pages, self._take_checked  # type: ignore[method-assign]
        self._check_pages, cache.pools.check_pages = cache.pools.check_pages, self._check_checked  # type: ignore[method-assign]

    def step(self) -> None:
        verbs = (self.acquire, self.insert, self.extend, self.release, self.lock, self.evict)
        rare = (self.retire, self.reset, self.vanish, self.end_session, self.reclaim, self.evict_beside)
        verb = self.rng.choices((*verbs, *rare), self._weights)[0]
        self.done[verb.__name__] += 1
        before, self.actor = Shares(self.cache), None
        try:
            verb()
        except OutOfSlotsError as error:
            self.done["refused by " + ("the pool" if error.tenant is None else "a cap")] += 1
        self.check()
        if verb in (self.acquire, self.insert, self.extend, self.lock, self.evict, self.evict_beside):
            self._check_floors(before, Shares(self.cache))

    # ------------------------------------------------------------ verbs

    def acquire(self) -> None:
        lease_id, session = self._new_lease()
        key = self._key()
        self.cache.acquire(lease_id, session, key, self.rng.randrange(6), priority=self.rng.randrange(2))
        self.open.append((lease_id, session))

    def lock(self) -> None:
        lease_id, session = self._new_lease()
        self.cache.lock(lease_id, session, self._key())
        self.open.append((lease_id, session))

    def insert(self) -> None:
        if self.open:
            lease_id, session = self.rng.choice(self.open)
            lease = self.cache.leases.get(lease_id, session)
            self.actor = self.cache.tenants.of(lease.key.extra_key)
            most = min(len(lease.key), lease.num_slots)
            num_tokens = self.rng.choice((most, self.rng.randint(0, most)))
            whole = num_tokens and num_tokens % self.cache.page_size == 0
            publish = bool(whole) and lease.state_slot is not None and num_tokens >= self.cache.published_len(lease)
            before = self._all_shares()
            self.cache.insert(lease_id, session, num_tokens, lease.key[:num_tokens], publish)
            if not publish:  # the copy of a state may evict
                assert before >= self._all_shares(), "an insert took slots"

    def extend(self) -> None:
        if self.open:
            lease_id, session = self.rng.choice(self.open)
            self.actor = self.cache.tenants.of(self.cache.leases.get(lease_id, session).key.extra_key)
            self.cache.extend(lease_id, session, self.rng.randrange(1, 9))

    def release(self) -> None:
        if self.open:
            lease = self.open.pop(self.rng.randrange(len(self.open)))
            assert self.cache.release(*lease)

    def evict(self) -> None:
        wanted, expected = self.rng.randrange(40), Shares(self.cache)
        dead = sum(expected.dead.values())
        expected.evict(wanted - dead, None)
        self.cache.evict(wanted)
        self._compare(expected)

    def evict_beside(self) -> None:
        """Evict as for a watermark of window slots or states, for no tenant in particular."""
        self.rng.choice((self.cache.evict_window, self.cache.evict_states))(self.rng.randrange(1, 9))

    def retire(self) -> None:
        gone = self.rng.choice(self._namespaces)
        self.cache.retire(lambda extra_key: extra_key == gone)

    def reset(self) -> None:
        self.cache.reset()

    def reclaim(self) -> None:
        live = Shares(self.cache).live_slots()
        self.cache.reclaim(self.rng.randrange(1, 30))
        assert Shares(self.cache).live_slots() == live

    def end_session(self) -> None:
        gone = self.rng.choice(SESSIONS)
        self.cache.end_session(gone)
        self.open = [lease for lease in self.open if lease[1] != gone]

    def vanish(self) -> None:
        """A session goes without a word; its slots are withheld for a while."""
        self.cache.free_withheld(self.rng.choice(SESSIONS))
        gone = self.rng.choice(SESSIONS)
        self.cache.quarantine_session(gone)
        self.open = [lease for lease in self.open if lease[1] != gone]

    # ------------------------------------------------------------ the model

    def _check_checked(self, num_pages: int, tenant: Tenant, num_windows: int | None = None) -> None:
        """Refuses exactly what cannot be had."""
        fits = Shares(self.cache).fits(tenant, max(0, num_pages) * self.cache.page_size)
        try:
            self._check_pages(num_pages, tenant, num_windows)
        except OutOfSlotsError as error:
            assert not fits or error.pool != "slots", f"{tenant.name} was refused {num_pages} pages that it could have"
            raise
        assert fits, f"{tenant.name} was promised {num_pages} pages that it cannot have"

    def _take_checked(self, num_pages: int, tenant: Tenant) -> Any:
        """Evicts exactly what the model evicts."""
        expected = Shares(self.cache)
        windows = self.cache.swa_sizes()
        starts = self._take_pages(num_pages, tenant)
        if num_pages > 0 and (windows is None or windows.free >= num_pages * self.cache.page_size):
            expected.take(tenant, num_pages * self.cache.page_size)
            self._compare(expected)
        return starts

    def _compare(self, expected: Shares) -> None:
        live = expected.live_slots()
        assert Shares(self.cache).live_slots() == live, "other slots were evicted than should be"
        self.done["evictions compared"] += 1

    def check(self) -> None:
        self.cache.check_invariants()
        shares = Shares(self.cache)
        for tenant in self.cache.tenants:
            assert tenant.held == shares.held[tenant] + shares.dead[tenant], tenant.name
            assert tenant.cap is None or tenant.held <= tenant.cap, tenant.name
        assert self.cache.tenants.caller is None, "a verb goes on being served"

    def _check_floors(self, before: Shares, after: Shares) -> None:
        for tenant in self.cache.tenants:
            if tenant is not self.actor:
                assert after.held[tenant] >= min(before.held[tenant], tenant.floor), (
                    f"{tenant.name} fell below its floor"
                )

    def _all_shares(self) -> list[int]:
        return [tenant.held for tenant in self.cache.tenants]

    # ------------------------------------------------------------ choices

    def _new_lease(self) -> tuple[str, str]:
        self._next_id += 1
        return f"l{self._next_id}", self.rng.choice(SESSIONS)

    def _key(self) -> RadixKey:
        """Draw tokens for a request, in runs as long as a page, so that prefixes are shared at every depth."""
        namespace = self.rng.choice(self._namespaces)
        self.actor = self.cache.tenants.of(namespace)
        page, length = self.cache.page_size, self.rng.randint(1, 10 * self.cache.page_size)
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += [self.rng.choice((0, 0, 1, 2))] * page
        return RadixKey(tokens[:length], namespace)
