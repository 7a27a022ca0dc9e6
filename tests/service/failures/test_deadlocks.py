"""Leases that wait for each other's slots: the cache rejects the youngest, and preemption lets all finish."""

from __future__ import annotations

import asyncio

import pytest
from support.caches.cache_under_test import CacheUnderTest, Pages

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.schemas import CacheConfig, InvalidRequest, PoolConfig, PoolExhausted, TenantConfig, UnknownLease

PAGE = 16
NEVER_S = 3600.0  # longer than the time limit of a test


async def fill(cache: CacheUnderTest, *sizes: int) -> list[Lease]:
    """Acquire one lease per size, with that number of slots. None of the slots can be evicted."""
    return [await cache.client.acquire([100 + number] * size) for number, size in enumerate(sizes)]


def growing(*leases: Lease) -> list[asyncio.Task[object]]:
    return [asyncio.create_task(lease.extend(1, timeout_s=NEVER_S)) for lease in leases]


# ---------------------------------------------------------------- preempt


async def test_a_preempted_request_is_taken_up_where_it_was(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))

    await lease.preempt(cache.tokens(1, 2), publish_state=cache.kind.publishes_states)

    with pytest.raises(UnknownLease, match="has ended"):
        await lease.extend(1)
    pages = await cache.pages()
    assert (pages.private, pages.leases) == (0, 0)
    assert await cache.matched(1, 2) == cache.reusable(2)


async def test_preempting_what_is_not_computed_yet_publishes_nothing(cache1: CacheUnderTest) -> None:
    for tokens in ([], ()):
        await (await cache1.client.acquire([1, 2])).preempt(tokens)
    assert await cache1.pages() == Pages(free=8)


async def test_a_preemption_with_other_tokens_is_refused_and_changes_nothing(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2])
    for tokens in ([2, 1], [1, 2, 3], None, "ab"):
        with pytest.raises(InvalidRequest):
            await lease.preempt(tokens)
    assert len(await lease.extend(1)) == 1


# ---------------------------------------------------------------- the youngest is rejected


async def test_the_youngest_of_leases_that_all_wait_is_refused_at_once(cache1: CacheUnderTest) -> None:
    before = (await cache1.client.stats()).deadlocks
    leases = await fill(cache1, 3, 2, 3)

    tasks = growing(leases[2], leases[0], leases[1])  # the order in the queue does not matter
    with pytest.raises(PoolExhausted, match="every lease that holds some waits for more: preempt") as refusal:
        await tasks[0]

    assert (refusal.value.deadlocked, refusal.value.can_ever_fit) == (True, True)
    assert refusal.value.args[-1] is True
    assert not tasks[1].done() and not tasks[2].done()
    assert (await cache1.client.stats()).deadlocks == before + 1
    await leases[2].preempt([102] * 3)
    await asyncio.gather(*tasks[1:])
    assert (await cache1.client.stats()).deadlocks == before + 1


async def test_the_next_youngest_is_refused_if_the_first_freed_too_little(cache1: CacheUnderTest) -> None:
    leases = await fill(cache1, 4, 3, 1)
    old = asyncio.create_task(leases[0].extend(3, timeout_s=NEVER_S))
    young, youngest = growing(*leases[1:])
    with pytest.raises(PoolExhausted):
        await youngest

    await leases[2].preempt([])  # frees one slot, but the oldest needs three
    with pytest.raises(PoolExhausted) as refusal:
        await young
    assert refusal.value.deadlocked
    await leases[1].preempt([])

    assert len(await old) == 3


@pytest.mark.parametrize("running", ["computes", "is granted"])
async def test_while_one_lease_may_end_the_others_wait(cache1: CacheUnderTest, running: str) -> None:
    leases = await fill(cache1, 3, 2, 3)
    grant = await leases[1].grant() if running == "is granted" else None
    tasks = await cache1.in_line(leases[0].extend(1), leases[2].extend(1))

    assert (await cache1.client.stats()).waiters == 2
    if grant is not None:
        await cache1.client.revoke(grant)
    else:
        await leases[1].release()
    await asyncio.gather(*tasks)


async def test_a_lease_that_ends_may_leave_only_waiting_ones(cache1: CacheUnderTest) -> None:
    leases = await fill(cache1, 4, 3, 1)
    tasks = await cache1.in_line(leases[0].extend(2), leases[1].extend(2))

    await leases[2].release()  # frees one slot, but each extend needs two

    with pytest.raises(PoolExhausted) as refusal:
        await tasks[1]
    assert refusal.value.deadlocked
    await leases[1].release()
    await tasks[0]


async def test_leases_that_only_lock_do_not_count(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2)
    locked = await cache1.client.lock([1, 2])
    leases = await fill(cache1, 3, 3)

    tasks = growing(*leases)
    with pytest.raises(PoolExhausted) as refusal:
        await tasks[1]
    assert refusal.value.deadlocked

    await locked.release()
    await tasks[0]


async def test_acquires_in_line_are_not_refused(cache1: CacheUnderTest) -> None:
    leases = await fill(cache1, 4, 4)
    (waiting,) = await cache1.in_line(cache1.client.acquire([9], timeout_s=NEVER_S))

    tasks = growing(*leases)
    with pytest.raises(PoolExhausted):
        await tasks[1]
    await leases[1].preempt([])
    await tasks[0]

    assert len(await waiting) == 1


async def test_what_is_in_quarantine_may_come_free() -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=8, device="cpu"))
    async with LocalPrefixCache(config) as cache:
        dead = PrefixCacheClient(cache)
        await dead.acquire([1, 2])
        leases = [await cache.acquire([3] * 3), await cache.acquire([4] * 3)]
        service = cache._host.service
        session = service.sessions.find(dead.session.session_id)
        assert session is not None
        service.reaper._vanish(session, TimeoutError())  # type: ignore[arg-type]
        assert (await cache.stats()).quarantined_slots == 2

        tasks = growing(*leases)
        async with asyncio.timeout(60):
            while (await cache.stats()).waiters < 2:  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.001)
        assert (await cache.stats()).deadlocks == 0
        service.reaper.close(dead.session.session_id)  # its client came back

        await asyncio.gather(*tasks)


async def test_a_share_is_deadlocked_by_itself() -> None:
    tenants = (TenantConfig(name="a", lora_id="a", cap_slots=4),)
    config = CacheConfig(pool=PoolConfig(num_slots=16, device="cpu"), tenants=tenants)
    async with LocalPrefixCache(config) as cache:
        other = await cache.acquire([9] * 4)  # a lease outside the tenant that does not wait
        leases = [await cache.acquire([number] * 2, lora_id="a") for number in range(2)]

        tasks = growing(*leases)
        with pytest.raises(PoolExhausted) as refusal:
            await tasks[1]

        assert (refusal.value.deadlocked, refusal.value.tenant) == (True, "a")
        await leases[1].preempt([])
        await tasks[0]
        await other.release()


async def test_window_slots_are_a_pool_of_their_own() -> None:
    pool = PoolConfig(num_slots=64, num_swa_slots=8, device="cpu")
    async with LocalPrefixCache(CacheConfig(pool=pool, sliding_window_size=2)) as cache:
        leases = [await cache.acquire([number] * 4) for number in range(2)]

        tasks = growing(*leases)
        with pytest.raises(PoolExhausted) as refusal:
            await tasks[1]

        assert (refusal.value.deadlocked, refusal.value.pool) == (True, "window slots")
        await leases[1].preempt([])
        await tasks[0]


# ---------------------------------------------------------------- sixty requests in a pool for five


class Load:
    """Requests that decode like `examples/worker.md`: page by page, or with all slots reserved if `reserve`."""

    def __init__(self, client: PrefixCacheClient | LocalPrefixCache, reserve: bool) -> None:
        self.client = client
        self.reserve = reserve
        self.computed = 0
        self.preempted: list[int] = []
        self.running: dict[int, float] = {}  # request: the time at which its current lease was granted

    async def serve(self, number: int, num_prompt: int = 200, num_new: int = 200) -> None:
        tokens = [number * 1000 + at for at in range(num_prompt)]
        total = num_prompt + num_new
        while len(tokens) < total or not self.reserve:
            new_tokens = total - len(tokens) if self.reserve else 0
            async with self.client.acquire(
                tokens, new_tokens=new_tokens, max_prefix_len=len(tokens) - 1, timeout_s=60
            ) as lease:
                self.running[number] = asyncio.get_running_loop().time()
                known = lease.prefix_len
                try:
                    while True:
                        self.computed += len(tokens) - known
                        await asyncio.sleep(0)  # the forward pass
                        known = len(tokens)
                        await lease.insert(tokens)
                        if known == total:
                            del self.running[number]
                            return
                        if len(lease) == known:
                            await lease.extend(PAGE, timeout_s=60)
                        tokens.append(number * 1000 + len(tokens))
                except PoolExhausted as error:
                    assert error.can_ever_fit
                    assert min(self.running, key=self.running.__getitem__) != number, "the oldest was preempted"
                    self.preempted.append(number)
                    del self.running[number]
                    await lease.preempt(tokens[:known])


async def finish(reserve: bool) -> Load:
    config = CacheConfig(page_size=PAGE, pool=PoolConfig(num_slots=2048, device="cpu"))
    async with LocalPrefixCache(config) as cache:
        load = Load(cache, reserve)
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(load.serve(number))
        stats = await cache.stats()
        assert (stats.private_slots, stats.open_leases, stats.waiters) == (0, 0, 0)
        await cache.check_invariants()
    return load


@pytest.mark.figures
async def test_sixty_requests_that_decode_page_by_page_all_finish() -> None:
    reserved, paged = await finish(reserve=True), await finish(reserve=False)

    ratio = paged.computed / reserved.computed
    print(f"\n{reserved.computed:,} tokens computed with slots reserved, {paged.computed:,} page by page: {ratio:.2f}x")
    print(f"{len(paged.preempted)} preemptions, at most {max(map(paged.preempted.count, range(60)))} of one request")
    assert not reserved.preempted
    assert ratio <= 1.6
