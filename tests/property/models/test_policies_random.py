"""Random traffic under each eviction policy: `RadixCache` evicts what its model evicts; and a fault in each is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.checked.radix_cache import CheckedRadixCache
from support.faults.split_faults import after_cuts
from support.more import more
from support.reference.policies import POLICIES, PairedPolicyCache
from support.traffic.radix import NUM_PAGES, RandomTraffic, TrafficFailed, run_traffic

from raydix.cache_core import RadixCache
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.eviction.policy import LFU, LRU, SLRU, Priority
from raydix.cache_core.eviction.policy import POLICIES as CLASSES
from raydix.cache_core.eviction.queue import EvictionQueue
from raydix.cache_core.kernels import Victims

Patch = pytest.MonkeyPatch
PAGE_SIZES = (1, 4, 16)


class PolicyTraffic(RandomTraffic):
    """The traffic of `RadixCache`, under a policy."""

    def __init__(self, policy: str, seed: int, page_size: int) -> None:
        self.policy = policy
        super().__init__(seed, page_size)

    def _make_pair(self) -> CheckedRadixCache:
        paged = self.seed % 2 == 1
        return PairedPolicyCache(self.page_size, NUM_PAGES, self.rng, self.policy, paged_pool=paged)

    def __repr__(self) -> str:
        return f"policy={self.policy}, {super().__repr__()}"


def run(policy: str, num_operations: int, seeds: int = 1, page_sizes: tuple[int, ...] = PAGE_SIZES) -> None:
    for seed in range(seeds):
        for page_size in page_sizes:
            run_traffic(PolicyTraffic(policy, seed, page_size), num_operations)


@pytest.mark.parametrize("policy", ["lru", "slru", *more(*(name for name in POLICIES if name not in ("lru", "slru")))])
def test_random_operations_agree_with_the_reference_model(policy: str) -> None:
    run(policy, num_operations=200)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_100000_random_operations_agree_with_the_reference_model(policy: str) -> None:
    run(policy, num_operations=11_200, seeds=3)


def test_every_policy_is_modelled() -> None:
    assert {*POLICIES, "2q"} == set(CLASSES), "support.reference.two_queues models 2q"


# ---------------------------------------------------------------- planted faults


def by(rank: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda policy, node: rank(node)


FAULTS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    f"{name} ranks as lru does": (
        name,
        lambda patch, name=name: patch.setattr(CLASSES[name], "rank", by(lambda node: node.own_access_time)),
    )
    for name in POLICIES
    if name != "lru"
}
FAULTS |= {
    "lru ranks as fifo does": ("lru", lambda patch: patch.setattr(LRU, "rank", by(lambda node: node.creation_time))),
    "of what was hit as often the newest goes first": (
        "lfu",
        lambda patch: patch.setattr(LFU, "rank", by(lambda node: (node.own_hits, -node.own_access_time))),
    ),
    "one hit protects": (
        "slru",
        lambda patch: patch.setattr(SLRU, "rank", by(lambda node: (node.own_hits >= 1, node.own_access_time))),
    ),
    "the protected segment is not kept in order": (
        "slru",
        lambda patch: patch.setattr(
            SLRU, "rank", by(lambda node: (node.own_hits >= 2, node.own_access_time if node.own_hits < 2 else 0))
        ),
    ),
    "the highest priority goes first": (
        "priority",
        lambda patch: patch.setattr(Priority, "rank", by(lambda node: (-node.own_priority, node.own_access_time))),
    ),
}


def _split_without(name: str, value: int) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def change(above: Any, node: Any) -> None:
            setattr(above if name == "creation_time" else node, name, value)

        after_cuts(patch, change)

    return plant


def _what_is_evicted_has_no_priority(patch: Patch) -> None:
    original = FullKV.evict_leaves

    def evict_leaves(full: FullKV, num_tokens: int, victims: Victims) -> None:
        known = {node: node.own_priority for top in full._tree.tops.values() for node in top.subtree()}
        original(full, num_tokens, victims)
        for node in victims.nodes:
            assert node.parent is not None
            node.parent.own_priority = known.get(node.parent, 0)  # retired nodes are in no ranking any more

    patch.setattr(FullKV, "evict_leaves", evict_leaves)


def _inserts_have_no_priority(patch: Patch) -> None:
    original = RadixCache.insert
    patch.setattr(RadixCache, "insert", lambda *args, priority=0, **kwargs: original(*args, **kwargs))


def _matches_have_no_priority(patch: Patch) -> None:
    original = RadixCache.match_prefix
    patch.setattr(RadixCache, "match_prefix", lambda cache, key, priority=0: original(cache, key))


def _uses_do_not_reach_the_queue(patch: Patch) -> None:
    patch.setattr(EvictionQueue, "touch", lambda queue, node: None)


FAULTS |= {
    "a split forgets the age of the prefix": ("fifo", _split_without("creation_time", 10**9)),
    "a split forgets the hits": ("lfu", _split_without("own_hits", 0)),
    "a split forgets the priority": ("priority", _split_without("own_priority", -(2**31))),
    "what is evicted takes its priority with it": ("priority", _what_is_evicted_has_no_priority),
    "what is inserted has no priority": ("priority", _inserts_have_no_priority),
    "what is matched gains no priority": ("priority", _matches_have_no_priority),
    "uses do not reach the queue": ("mru", _uses_do_not_reach_the_queue),
    "hits do not reach the queue": ("lfu", _uses_do_not_reach_the_queue),
}
SLOWEST = "the protected segment is not kept in order"  # it takes thousands of operations to show


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if each == SLOWEST else each for each in FAULTS]
)
def test_a_planted_fault_is_caught(name: str, monkeypatch: Patch) -> None:
    policy, plant = FAULTS[name]
    plant(monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run(policy, num_operations=600, seeds=6, page_sizes=(4, 1))

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
