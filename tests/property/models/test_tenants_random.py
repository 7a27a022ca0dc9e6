"""Tenants under random traffic: held slots, refusals and evictions equal those of a simple model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.traffic.tenants import TenantTraffic, make_cache

from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.kernels import LockAccounting
from raydix.cache_core.leases import kv_cache
from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.tree_node import TreeNode

Patch = pytest.MonkeyPatch


def drive(traffic: TenantTraffic, num_steps: int) -> None:
    for _ in range(num_steps):
        traffic.step()


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
@pytest.mark.parametrize(("page_size", "spares"), [(1, False), (4, True)])
def test_floors_and_caps_hold_whatever_tenants_do(page_size: int, spares: bool, policy: str) -> None:
    traffic = TenantTraffic(make_cache(page_size, policy, spares=spares), random.Random(page_size))

    drive(traffic, 500)

    assert min(traffic.done["refused by the pool"], traffic.done["refused by a cap"]) > 2, traffic.done
    assert min(tenant.evicted for tenant in traffic.cache.tenants) > 0
    assert len(traffic.done) == 14, f"something never happened: {traffic.done}"


@pytest.mark.parametrize("short_of", [{"with_states": True}, {"window_pages": 40}, {"window_pages": 15}])
def test_floors_and_caps_hold_where_windows_and_states_run_short_as_well(short_of: dict[str, Any]) -> None:
    traffic = TenantTraffic(make_cache(1, "lru", **short_of), random.Random(3))

    drive(traffic, 500)

    assert len(traffic.done) == 14, f"something never happened: {traffic.done}"


@pytest.fixture
def unhurried(monkeypatch: Patch) -> TenantTraffic:
    """Traffic in which retired nodes wait for the reclaim, while windows run short."""
    monkeypatch.setattr(kv_cache, "_RECLAIMED_AT_ONCE", 0)
    cache = make_cache(1, "lru", window_pages=15)
    return TenantTraffic(cache, random.Random(0), ("quiet", "quiet", None), retiring=2, beside=10)


def test_floors_hold_where_what_was_retired_waits_to_be_reclaimed(unhurried: TenantTraffic) -> None:
    drive(unhurried, 1000)


# ---------------------------------------------------------------- planted faults


def floors_are_ignored_in_counting(patch: Patch) -> None:
    patch.setattr(Tenant, "spare", property(lambda tenant: tenant.evictable))


def floors_are_ignored_in_evicting(patch: Patch) -> None:
    def next_victim(tenants: Tenants) -> Any:
        heads = (tenant.queue.first() for tenant in tenants)
        first = min((head for head in heads if head is not None), default=None)
        return None if first is None else first[2]

    patch.setattr(Tenants, "next_victim", next_victim)
    patch.setattr(FullKV, "may_take", lambda component, leaf: True)


def a_leaf_goes_whole_across_a_floor(patch: Patch) -> None:
    patch.setattr(FullKV, "_cut_to_spare", lambda component, leaf: None)


def a_floor_keeps_its_own_tenant_out(patch: Patch) -> None:
    def kept_from(tenants: Tenants, caller: Tenant) -> int:
        return sum(tenant.evictable - tenant.spare for tenant in tenants)

    patch.setattr(Tenants, "kept_from", kept_from)


def caps_are_ignored(patch: Patch) -> None:
    patch.setattr(Tenant, "excess", lambda tenant, num_slots: 0)


def who_is_at_its_cap_evicts_others(patch: Patch) -> None:
    patch.setattr(LeaseAllocator, "_evict_own", lambda room, tenant, num_tokens: None)


def victims_are_chosen_by_tenant_before_rank(patch: Patch) -> None:
    def next_victim(tenants: Tenants) -> Any:
        for tenant in tenants:
            if tenant is tenants.caller or tenant.held - tenant.dead > tenant.floor:
                if (head := tenant.queue.first()) is not None:
                    return head[2]
        return None

    patch.setattr(Tenants, "next_victim", next_victim)


def what_is_evicted_goes_on_counting(patch: Patch) -> None:
    count = FullKV._count

    def count_what_comes(full: FullKV, namespace: Any, evictable: int, cached: int) -> None:
        if cached >= 0:
            count(full, namespace, evictable, cached)

    patch.setattr(FullKV, "_count", count_what_comes)


def locks_are_not_counted(patch: Patch) -> None:
    patch.setattr(FullKV, "_lock", lambda full, node: LockAccounting.lock(full, node))


def a_retired_namespace_is_kept_by_its_floor(patch: Patch) -> None:
    patch.setattr(Tenants, "retire", lambda tenants, top: tenants.of_node(top).retired.add(top))


def duplicates_stay_private(patch: Patch) -> None:
    note = LeaseAllocator.note_published

    def note_published(room: LeaseAllocator, starts: Any, duplicates: Any, tenant: Tenant) -> None:
        note(room, starts, duplicates, tenant)
        tenant.private += len(duplicates) * room._page_size

    patch.setattr(LeaseAllocator, "note_published", note_published)


def what_leases_held_goes_on_counting(patch: Patch) -> None:
    free = LeaseAllocator.free_private

    def free_private(room: LeaseAllocator, starts: Any, state_slot: int | None, tenant: Tenant) -> None:
        free(room, starts, state_slot, tenant)
        tenant.private += len(starts) * room._page_size

    patch.setattr(LeaseAllocator, "free_private", free_private)


def withheld_slots_are_not_counted(patch: Patch) -> None:
    quarantine = TenantTraffic.vanish

    def vanish(traffic: TenantTraffic) -> None:
        quarantine(traffic)
        for lease in traffic.cache.quarantine:
            traffic.cache.tenants.of(lease.key.extra_key).private -= len(lease.private_starts)

    patch.setattr(TenantTraffic, "vanish", vanish)


def a_tenant_is_served_after_its_verb(patch: Patch) -> None:
    evict = LeaseAllocator.evict

    def evict_and_stay(room: LeaseAllocator, *wanted: Any, tenant: Tenant | None = None, **options: Any) -> Any:
        try:
            return evict(room, *wanted, tenant=tenant, **options)
        finally:
            room._tenants.caller = tenant

    patch.setattr(LeaseAllocator, "evict", evict_and_stay)


def a_state_takes_a_leaf_below_the_floor(patch: Patch) -> None:
    evict = PrefixCache._evict_components

    def evict_from_all(tree: PrefixCache, victims: Any, goals: Any) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(FullKV, "may_take", lambda component, leaf: True)
            evict(tree, victims, goals)

    patch.setattr(PrefixCache, "_evict_components", evict_from_all)


FAULTS: list[Callable[[Patch], None]] = [
    floors_are_ignored_in_counting,
    floors_are_ignored_in_evicting,
    a_leaf_goes_whole_across_a_floor,
    a_floor_keeps_its_own_tenant_out,
    caps_are_ignored,
    who_is_at_its_cap_evicts_others,
    victims_are_chosen_by_tenant_before_rank,
    what_is_evicted_goes_on_counting,
    locks_are_not_counted,
    a_retired_namespace_is_kept_by_its_floor,
    duplicates_stay_private,
    what_leases_held_goes_on_counting,
    withheld_slots_are_not_counted,
    a_tenant_is_served_after_its_verb,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    traffic = TenantTraffic(make_cache(1, "lru"), random.Random(1))

    with pytest.raises(AssertionError):
        drive(traffic, 500)


def test_a_state_must_not_take_a_leaf_below_a_floor(monkeypatch: Patch) -> None:
    a_state_takes_a_leaf_below_the_floor(monkeypatch)
    traffic = TenantTraffic(make_cache(1, "lru", with_states=True), random.Random(3))

    with pytest.raises(AssertionError, match="fell below its floor"):
        drive(traffic, 500)


def test_what_was_retired_must_not_count_for_a_floor(unhurried: TenantTraffic, monkeypatch: Patch) -> None:
    def may_take(component: FullKV, leaf: TreeNode) -> bool:
        tenant = component.tenants.of_node(leaf)
        return tenant is component.tenants.caller or not leaf.namespace.live or tenant.held - len(leaf) >= tenant.floor

    monkeypatch.setattr(FullKV, "may_take", may_take)

    with pytest.raises(AssertionError, match="fell below its floor"):
        drive(unhurried, 1000)
