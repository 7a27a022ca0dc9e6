"""Workers on one small cache; every operation may be cancelled. `test_3_no_slot_is_lost` shuffles them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import numpy as np
from support.caches.cache_kinds import KindUnderTest
from support.caches.cache_under_test import pools_of
from support.processes.shuffled_loop import CancelledAt

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.schemas import CacheError, CacheStats, CloseSession, LeaseGrant

SETTLED_S = 30.0  # by the loop's own clock: waiters and silent sessions have been given up by then


class Floor:
    """The cache, and the grants that its workers pass to each other.

    Attributes:
        cache: the cache of this process.
        door: the cache, or a handle of it, for clients.
        grants: handed over, and not adopted as far as the workers know: they end when their time runs out.
        counts: operations by their outcomes.
    """

    def __init__(
        self, cache: LocalPrefixCache, door: Any, kind: KindUnderTest, rng: Random, num_workers: int = 3
    ) -> None:
        self.cache = cache
        self.door = door
        self.kind = kind
        self.rng = rng
        self.grants: list[LeaseGrant] = []
        self.counts = {"done": 0, "refused": 0, "cancelled": 0}
        self.left: set[str] = set()  # sessions that their clients have closed
        self.workers = [Worker(self) for _ in range(num_workers)]

    async def run(self, num_operations: int) -> None:
        """Let them work, and see that nothing is lost."""
        await asyncio.gather(*[worker.work(num_operations) for worker in self.workers])
        await self.end()

    async def run_one(self, verb: str, cancel_at: int, crowded: bool) -> int:
        """Have the first do one thing, `crowded` while the others hold all there is; returns how often it waited."""
        worker, *others = self.workers
        if verb in OF_A_LEASE:
            await worker.begin("acquire", 0)
        if verb in ("adopt", "revoke"):
            granter = others[0] if verb == "adopt" else worker
            await granter.begin("acquire", 0)
            await granter.use("grant", 0)
        if crowded:
            await others[0].fill()
        operation = asyncio.ensure_future(worker.operate(verb, cancel_at))
        while others[0].held:
            await others[0].end(0)
        num_awaits = await operation
        while worker.held:
            await worker.end(0)
        await self.end()
        return num_awaits

    async def end(self) -> None:
        """Check that no lease is left after all workers have released theirs, before and after they close."""
        await asyncio.sleep(SETTLED_S)
        stats = self.stats()
        held = {(lease.lease_id, lease.session_id) for lease in self.cache._host.service.core.leases}
        assert not held, f"no worker holds {held}, and no grant of it stands"
        # Slots of a session that is over stay in quarantine until its client hears of that, or closes.
        assert stats.waiters == 0, stats
        await asyncio.gather(*[worker.client.close() for worker in self.workers])
        for worker in self.workers:
            self.note_left(worker.client)
        await asyncio.sleep(SETTLED_S)  # a session with a lost close expires
        self.end_left()
        self.check_all_given_back()
        await self.cache.close()
        await asyncio.sleep(SETTLED_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    def note_left(self, client: PrefixCacheClient) -> None:
        """Note the sessions of a client that has closed."""
        self.left |= {client.session.session_id, *client.session._past_ids}

    def end_left(self) -> None:
        """Have the processes of closed clients end: if a close was lost, its slots stay in quarantine until then."""
        for session_id in self.left:
            self.cache._host.service.close_session(CloseSession(session_id=session_id))

    def check_all_given_back(self) -> None:
        """Check that no lease is open, and that every slot is free or in the tree."""
        self.cache._host.service.core.check_invariants()
        stats = self.stats()
        assert (stats.open_leases, stats.open_sessions, stats.waiters) == (0, 0, 0), stats
        for pool in pools_of(stats):
            assert pool.free_slots + pool.evictable_slots == pool.num_slots, pool

    def check_known(self, lease: Lease) -> None:
        """After an insert a lease's holder knows its slots, whatever became of the answers before."""
        core = self.cache._host.service.core
        record = core.leases.find(lease.lease_id, lease.transport.session_id)
        if record is not None:
            known = lease._held.starts
            assert known.tolist() == record.starts[: len(known)].tolist(), lease
            window = np.frombuffer(lease._held._window, "<i4")[: len(known)]
            assert window.tolist() == core.swa_starts(record)[: len(known)].tolist(), lease

    def check_open(self, lease: Lease) -> None:
        """A lease that its holder may write is open while its session is: an offer taken back does not end it."""
        service = self.cache._host.service
        if self.door is self.cache and lease.may_write and lease.transport.session_id in service.sessions:
            assert service.core.leases.find(lease.lease_id, lease.transport.session_id) is not None, lease

    def stats(self) -> CacheStats:
        """Return the counts of the cache, without a session."""
        return self.cache._host.service.stats()

    async def attempt(self, operation: Coroutine[Any, Any, Any], cancel_at: int = 0) -> tuple[Any, int]:
        """An operation's result, None if it failed or was cancelled, and how often it was suspended."""
        interrupted = CancelledAt(operation, cancel_at, later=self.rng.random() < 0.5)
        task = asyncio.ensure_future(_awaited(interrupted))
        await asyncio.wait((task,))
        if task.cancelled():
            outcome = "cancelled"
        elif task.exception() is not None:
            outcome = "refused"
            await self._check_typed(task)
        else:
            outcome = "done"
        self.counts[outcome] += 1
        return (task.result() if outcome == "done" else None), interrupted.num_awaits

    async def _check_typed(self, task: asyncio.Task[Any]) -> None:
        try:
            await task
        except CacheError as error:
            assert type(error) is not CacheError, f"an internal error: {error}"


async def _awaited(interrupted: CancelledAt) -> Any:
    return await interrupted


class Worker:
    """One client after another, and the leases it holds."""

    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.rng = floor.rng
        self.client = PrefixCacheClient(floor.door)
        self.held: list[tuple[Lease, list[int]]] = []  # with the tokens of each

    async def work(self, num_operations: int) -> None:
        """Do this and that, some of it cancelled, and let go of all that is held."""
        for _ in range(num_operations):
            await self.operate(self.rng.choice(VERBS), self.rng.choice((0, 0, 1, 2, 3, 5)))
        while self.held:
            await self.end(self.rng.choice((0, 0, 1, 2)))

    async def operate(self, verb: str, cancel_at: int) -> int:
        """One operation; returns how often it was suspended."""
        if verb in ("acquire", "lock"):
            return await self.begin(verb, cancel_at)
        if verb in OF_A_LEASE and verb not in ("end", "leave"):
            return await self.use(verb, cancel_at) if self.held else 0
        if verb == "end":
            return await self.end(cancel_at) if self.held else 0
        if verb in ("adopt", "revoke"):
            return await self.settle(verb, cancel_at)
        if verb == "leave":
            return await self.leave(cancel_at)
        if verb == "fall silent":
            await self.fall_silent()
            return 0
        operation = {
            "match": lambda: self.client.match(self.tokens()),
            "explain": lambda: self.client.explain(self.tokens()),
            "evict": lambda: self.client.evict(self.rng.randint(1, 4 * self.floor.kind.page_size)),
            "retire": lambda: self.client.retire(lora_id="a"),
            "reset": lambda: self.client.reset(),
            "set_weights": lambda: self.client.set_weights(f"{self.rng.random()}"),
            "stats": lambda: self.client.stats(),
        }[verb]
        return (await self.floor.attempt(operation(), cancel_at))[1]

    async def fall_silent(self) -> None:
        """Give no sign of life for a while, which may be longer than the time to live."""
        self.client.session._timer.stop()
        if self.client.session._beating is not None:
            self.client.session._beating.cancel()  # else its answer starts the timer again
        await asyncio.sleep(self.rng.randrange(10))

    async def begin(self, verb: str, cancel_at: int) -> int:
        tokens, lora_id = self.tokens(), self.rng.choice((None, "a"))
        if verb == "lock":
            operation = self.client.lock(tokens, lora_id=lora_id)
        else:
            room = {"new_tokens": self.rng.randrange(4), "timeout_s": self.rng.choice((0, 1, 5))}
            operation = self.client.acquire(tokens, lora_id=lora_id, **room)
        lease, num_awaits = await self.floor.attempt(operation, cancel_at)
        if lease is not None:
            self.held.append((lease, tokens))
        return num_awaits

    async def fill(self) -> None:
        """Hold all that is free, a page at a time."""
        tokens = [9] * self.floor.kind.page_size
        while (lease := (await self.floor.attempt(self.client.acquire(tokens, timeout_s=0)))[0]) is not None:
            self.held.append((lease, tokens))

    async def use(self, verb: str, cancel_at: int) -> int:
        lease, tokens = self.rng.choice(self.held)
        self.floor.check_open(lease)
        page_size = self.floor.kind.page_size
        operation: Coroutine[Any, Any, Any]
        if verb == "grant":
            operation = lease.grant(timeout_s=self.rng.choice((None, 1, 5)))
        elif verb == "extend":
            operation = lease.extend(self.rng.randint(1, 5), timeout_s=self.rng.choice((0, 1, 5)))
        elif verb == "release_window":
            operation = lease.release_window(self.rng.randint(0, len(lease)))
        elif verb == "preempt":
            operation = lease.preempt(tokens[: self.rng.randint(0, min(len(tokens), len(lease)))])
        else:
            whole = self.rng.randint(0, min(len(tokens), len(lease)) // page_size) * page_size
            states = self.floor.kind.publishes_states and whole > 0
            operation = lease.insert(tokens[:whole] or tokens[:1], publish_state=states)
        result, num_awaits = await self.floor.attempt(operation, cancel_at)
        if verb == "grant" and result is not None:
            self.floor.grants.append(result)
        if verb == "insert" and result is not None:
            self.floor.check_known(lease)
        self.held = [(held, its) for held, its in self.held if not held._ended]
        return num_awaits

    async def settle(self, verb: str, cancel_at: int) -> int:
        """Adopt a grant, or revoke it."""
        if not self.floor.grants:
            return 0
        grant = self.floor.grants.pop(self.rng.randrange(len(self.floor.grants)))
        if verb == "revoke":
            revoked, num_awaits = await self.floor.attempt(self.client.revoke(grant), cancel_at)
            self.floor.grants += [grant] if revoked is None else []
            return num_awaits
        lease, num_awaits = await self.floor.attempt(self.client.adopt(grant), cancel_at)
        if lease is None:
            self.floor.grants.append(grant)
        else:
            self.held.append((lease, lease._tokens.tolist()))
        return num_awaits

    async def end(self, cancel_at: int) -> int:
        lease, _ = self.held.pop(self.rng.randrange(len(self.held)))
        return (await self.floor.attempt(self.rng.choice((lease.release, lease.abort))(), cancel_at))[1]

    async def leave(self, cancel_at: int) -> int:
        """Close, and come back as another client."""
        leaving, self.client = self.client, PrefixCacheClient(self.floor.door)
        self.held.clear()
        num_awaits = (await self.floor.attempt(leaving.close(), cancel_at))[1]
        await leaving.close()  # waits for running operations
        self.floor.note_left(leaving)
        return num_awaits

    def tokens(self) -> list[int]:
        """Some pages of two sorts, and mostly not a whole number of them."""
        page_size = self.floor.kind.page_size
        row = [token for _ in range(self.rng.randint(1, 4)) for token in [self.rng.randint(1, 2)] * page_size]
        return row[: len(row) - self.rng.randrange(page_size)]


OF_A_LEASE = ("extend", "insert", "grant", "preempt", "release_window", "end", "leave")
OTHERS = ("acquire", "lock", "adopt", "revoke", "match", "explain", "evict", "retire", "reset", "set_weights", "stats")
OFTEN = ("acquire",) * 5 + ("insert", "insert", "extend", "adopt", "end")
VERBS = (*OF_A_LEASE, *OTHERS, *OFTEN, "fall silent")
