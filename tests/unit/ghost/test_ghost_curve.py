"""The ghost curve counts what caches of other sizes would have hit: exactly, if it follows every page."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from support.reference.ghost import ReferenceGhost
from support.tiers.tiered_cache import TieredCache
from support.tiers.two_tiers import Moves

from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.ghost.curve import GhostCurve
from raydix.cache_core.ghost.prefix_hashes import PrefixHasher
from raydix.cache_core.ghost.reuse_stack import Group, ReuseStack
from raydix.cache_core.tiers.tier import Tier

PAGE = 4


def cache_of(num_slots: int, page_size: int = PAGE) -> KVCache:
    allocator = TokenToKVPoolAllocator(num_slots, page_size)
    return KVCache(RadixCache(page_size, None, allocator), allocator)


def request(cache: KVCache, lease_id: str, tokens: list[int], extra_key: str | None = None) -> None:
    """Look a prompt up, publish it, end."""
    key = RadixKey(tokens, extra_key)
    cache.acquire(lease_id, "s", key)
    cache.insert(lease_id, "s", len(key), key[:0])
    cache.release(lease_id, "s")


def conversations(seed: int, num_requests: int) -> Iterator[list[int]]:
    """Prompts that grow turn by turn, over a few system prompts; one of two dozen conversations goes on, or ends."""
    rng = random.Random(seed)
    live: list[list[int]] = []
    for _ in range(num_requests):
        if len(live) < 24:
            live.append([rng.randrange(3)] * 2 * PAGE)
        turns = live.pop(rng.randrange(len(live)))
        turns += [rng.randrange(2**20) for _ in range(rng.randrange(1, 4 * PAGE))]
        yield list(turns)
        if rng.random() < 0.9:
            live.append(turns)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_are_counted_as_the_reference_counts_them(seed: int) -> None:
    rng = random.Random(seed)
    cache = cache_of(100_000)
    ghost, reference = GhostCurve(PAGE, 100_000, max_pages=25_000), ReferenceGhost(PAGE)
    cache.observers += [ghost, reference]
    open_leases: list[str] = []

    for step in range(400):
        match rng.choices(("acquire", "publish", "grow", "end", "retire", "look"), (8, 6, 4, 6, 0.2, 0.3))[0]:
            case "acquire":
                pages = [rng.choice((1, 2**8, 2**40)) for _ in range(6)]
                ids = [page for page in pages for _ in range(PAGE)][: rng.randrange(1, 6 * PAGE + 1)]
                extra_key, most = rng.choice((None, "a")), rng.choice((None, len(ids) - 1, PAGE))
                cache.acquire(f"{step}", "s", RadixKey(ids, extra_key), max_prefix_len=most)
                open_leases.append(f"{step}")
            case "publish" if open_leases:
                lease = cache.leases.get(rng.choice(open_leases), "s")
                cache.insert(lease.lease_id, "s", len(lease.key), lease.key[:0])
            case "grow" if open_leases:
                lease = cache.leases.get(rng.choice(open_leases), "s")
                suffix = RadixKey([rng.randrange(3) for _ in range(PAGE)], lease.key.extra_key)
                cache.extend(lease.lease_id, "s", len(suffix))
                cache.insert(lease.lease_id, "s", len(lease.key) + len(suffix), suffix)
            case "end" if open_leases:
                cache.release(open_leases.pop(rng.randrange(len(open_leases))), "s")
            case "retire":
                extra_key = rng.choice((None, "a"))
                cache.retire(lambda each, extra_key=extra_key: each == extra_key)
            case "look":
                assert ghost.hit_rates([PAGE]) == pytest.approx([reference.hit_rate(PAGE)])

    sizes = [PAGE * pages for pages in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 25_000)]
    assert ghost.hit_rates(sizes) == pytest.approx([reference.hit_rate(size) for size in sizes])
    assert reference.hit_rate(sizes[-1]) > reference.hit_rate(8 * PAGE) > 0


def tiers_of(num_slots: int, below: int) -> TieredCache:
    """Return a cache above a larger one."""
    cache = cache_of(num_slots)
    return TieredCache(cache.tree, cache.allocator, lower=Tier("host", "CPU", cache_of(below)))


@pytest.mark.parametrize("max_pages", [16_384, 200], ids=["all pages", "fewer than the tier below has"])
def test_a_tier_below_leaves_the_curve_as_it_was(max_pages: int) -> None:
    rng, sizes = random.Random(3), [64, 128, 256, 512, 800]
    alone, tiers = cache_of(256), tiers_of(256, below=2_048)
    caches = {cache: GhostCurve(PAGE, PAGE * max_pages, max_pages=max_pages) for cache in (alone, tiers)}
    for cache, ghost in caches.items():
        cache.observers.append(ghost)
    prompts = [[number // 3, number, *range(rng.randrange(6 * PAGE))] * 2 for number in range(90)]

    for place in range(1_200):
        prompt = prompts[min(int(rng.expovariate(0.03)), 89)]
        key = RadixKey(prompt[: rng.randrange(1, len(prompt) + 1)])
        for cache in caches:  # Each lease is open during two more requests.
            cache.acquire(f"{place}", "s", key)
            cache.insert(f"{place}", "s", len(key), key[:0])
            cache.release(f"{place - 2}", "s")

    of_one, of_both = (ghost.hit_rates(sizes) for ghost in caches.values())
    assert of_both == of_one
    assert caches[alone].tokens_requested == caches[tiers].tokens_requested
    assert tiers.moves.loads.counts.loaded > 1_000


def test_a_request_that_begins_again_counts_once() -> None:
    upper, lower = cache_of(64), cache_of(128)
    moves = Moves(Tier("device", "GPU", upper), Tier("host", "CPU", lower))
    upper.watch_victims(moves.write_before_eviction)
    upper.observers.append(ghost := GhostCurve(PAGE, 1_024))
    request(upper, "first", [1] * 2 * PAGE)
    upper.evict(2 * PAGE)

    lease = upper.acquire("again", "s", RadixKey([1] * 2 * PAGE))
    load = moves.prepare_load(lease)
    assert load is not None
    upper.reset()
    assert moves.complete(load, load.num_pages).must_restart
    request(upper, "again", [1] * 2 * PAGE)

    assert ghost.tokens_requested == 4 * PAGE
    assert ghost.hit_rates([1_024]) == [0.0]


def test_a_running_cache_tells_what_others_hit() -> None:
    sizes = [1_024, 2_048, 4_096]
    prompts = list(conversations(seed=1, num_requests=1_500))
    ghost = GhostCurve(PAGE, sizes[-1])
    watched = cache_of(sizes[0])
    watched.observers.append(ghost)
    for place, prompt in enumerate(prompts):
        request(watched, str(place), prompt)

    real = []
    for size in sizes:
        cache = cache_of(size)
        for place, prompt in enumerate(prompts):
            request(cache, str(place), prompt)
        real.append(cache.counters.tokens_reused / cache.counters.tokens_requested)

    assert ghost.hit_rates(sizes) == pytest.approx(real, abs=0.03)
    assert real[-1] - real[0] > 0.05, "the sizes make no difference: the test shows nothing"


def test_a_sample_tells_nearly_the_same_from_a_bounded_number_of_pages() -> None:
    size = 8_192
    cache = cache_of(size)
    every = GhostCurve(PAGE, size, max_pages=size // PAGE)
    some = GhostCurve(PAGE, size, max_pages=size // PAGE // 4)
    cache.observers += [every, some]

    for place, prompt in enumerate(conversations(seed=2, num_requests=1_500)):
        request(cache, str(place), prompt)

    sizes = [512, 1_024, 4_096]
    assert some.sample_rate == 1 / 4
    assert some.hit_rates(sizes) == pytest.approx(every.hit_rates(sizes), abs=0.04)
    assert len(some._stack) <= size // PAGE // 4
    assert not some._open


def test_the_stack_forgets_what_lies_too_deep() -> None:
    stack = ReuseStack(max_pages=2)
    a, b, c = [1], [2], [3]

    stack.use([Group(a, False, True), Group(b, False, True), Group(c, False, True)])
    depths = stack.use([Group(a, True, False), Group(b, True, False), Group(c, True, False)])

    assert [each.tolist() for each in depths] == [[-1], [1], [1]]


def test_looking_a_page_up_stores_nothing() -> None:
    stack = ReuseStack(max_pages=9)
    page = [1]

    depths = stack.use([Group(page, True, False), Group(page, True, False)])

    assert [each.tolist() for each in depths] == [[-1], [-1]]
    assert len(stack) == 0


def test_blocks_of_uses_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    groups = [
        Group(rng.permutation(40)[: rng.integers(0, 9)].tolist(), bool(rng.integers(2)), bool(rng.integers(2)))
        for _ in range(300)
    ]
    at_once = [each.tolist() for each in ReuseStack(1_000).use(groups)]

    one_by_one = ReuseStack(1_000)
    alone = [one_by_one.use([group])[0].tolist() for group in groups]
    monkeypatch.setattr("raydix.cache_core.ghost.reuse_stack._BLOCK", 50)
    in_parts = [each.tolist() for each in ReuseStack(1_000).use(groups)]

    assert at_once == alone == in_parts


def hashes(*keys: RadixKey, seeds: tuple[int, ...] = ()) -> list[list[int]]:
    num_pages = [len(key) // PAGE for key in keys]
    flat = PrefixHasher(PAGE).hash_pages(keys, num_pages, seeds or (0,) * len(keys))
    return [each.tolist() for each in np.split(flat, np.cumsum(num_pages)[:-1])]


def test_equal_prefixes_have_equal_hashes_whatever_follows_and_whoever_is_hashed_with_them() -> None:
    a, b = RadixKey([1, 2, 3, 4, 5, 6, 7, 8]), RadixKey([1, 2, 3, 4, 5, 6, 7, 9])
    wide = RadixKey([1, 2, 3, 4, 2**40, 6, 7, 8])

    (of_a, of_b, of_wide), (alone,) = hashes(a, b, wide), hashes(b)

    assert of_b == alone
    assert of_a[0] == of_b[0] == of_wide[0]
    assert len({of_a[1], of_b[1], of_wide[1]}) == 3


def test_place_and_namespace_make_a_difference() -> None:
    twice = RadixKey([1, 2, 3, 4, 1, 2, 3, 4])

    first, other = hashes(twice, twice, seeds=(1, 2))

    assert len({*first, *other}) == 4


def test_no_two_of_many_prefixes_meet() -> None:
    keys = [RadixKey([first, 0, 0, second << 12] * 2) for first in range(64) for second in range(64)]
    pages = [page for key in hashes(*keys) for page in key]

    assert len(set(pages)) == len(pages)
