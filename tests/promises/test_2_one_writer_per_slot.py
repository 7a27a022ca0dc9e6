"""A slot is never writable by two leases, and never freed while a lease holds it.

Each lease writes its own number into all its writable slots. After any other operation it must read the number there
again, and no other lease may get the same slots, window slots or state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from support.caches.cache_kinds import radix
from support.caches.cache_under_test import CacheUnderTest, unchecked
from support.models.stamped_kv import filled_kv

from raydix.actors import AttachedPool, Lease
from raydix.cache_core import KVCache, SlotError, TokenToKVPoolAllocator
from raydix.schemas import InvalidRequest, PoolExhausted

Patch = pytest.MonkeyPatch
VERBS = ("acquire", "acquire", "acquire", "extend", "insert", "insert", "hand_over", "release", "evict", "retire")


class Holders:
    """Two clients, the leases they hold, and the tokens of each."""

    def __init__(self, cache: CacheUnderTest) -> None:
        self.cache = cache
        self.rng = Random(1)
        self.clients = [cache.another_client(), cache.another_client()]
        self.pools: dict[Any, AttachedPool] = {}  # by client
        self.held: dict[int, tuple[Lease, list[int]]] = {}  # by number, with its tokens
        self.done: Counter[str] = Counter()

    async def run(self, num_steps: int) -> None:
        """Do random operations; check all leases after each."""
        self.pools = {client: await client.attach_pool(mapped=False) for client in self.clients}
        for number in range(1, num_steps + 1):
            verb = self.rng.choice(VERBS) if self.held else "acquire"
            try:
                await getattr(self, verb)(number)
            except PoolExhausted:
                await self.release(number)
            else:
                self.done[verb] += 1
            await self.check()
        assert set(self.done) == set(VERBS)

    async def acquire(self, number: int) -> None:
        tokens = self.cache.tokens(*(self.rng.randint(1, 2) for _ in range(self.rng.randint(1, 3))))
        lease = await self.rng.choice(self.clients).acquire(tokens, new_tokens=2, lora_id="x", timeout_s=0)
        self.held[number] = (lease, tokens)
        await self.write(number)

    async def extend(self, number: int) -> None:
        number, (lease, _) = self.some()
        await lease.extend(self.rng.randint(1, self.cache.page_size), timeout_s=0)
        await self.write(number)

    async def insert(self, number: int) -> None:
        """Publish a lease: from then on the slots are the tree's."""
        _, (lease, tokens) = self.some()
        await lease.insert(tokens, publish_state=self.cache.kind.publishes_states)

    async def hand_over(self, number: int) -> None:
        number, (lease, tokens) = self.some()
        self.held[number] = (await self.rng.choice(self.clients).adopt(await lease.grant()), tokens)

    async def release(self, number: int) -> None:
        number, (lease, _) = self.some()
        del self.held[number]
        await lease.release()

    async def evict(self, number: int) -> None:
        await self.cache.client.evict(2 * self.cache.page_size)

    async def retire(self, number: int) -> None:
        await self.cache.client.retire(lora_id="x")

    def some(self) -> tuple[int, tuple[Lease, list[int]]]:
        return self.rng.choice(list(self.held.items()))

    async def write(self, number: int) -> None:
        lease, _ = self.held[number]
        private = lease.slots[lease.published_len :]
        arrays = filled_kv(self.cache.kind, len(private), number)
        await self.pools[lease.client].write_kv(lease, private, *arrays)

    async def check(self) -> None:
        """Check that a private slot is in no other lease, that each lease reads its number, and that no other can write
        it."""
        writable: dict[int, int] = {}
        for number, (lease, _) in self.held.items():
            for slot in lease.slots[lease.published_len :].tolist():
                assert writable.setdefault(slot, number) == number, f"slot {slot} is writable by two leases"
        for number, (lease, _) in self.held.items():
            shared = set(lease.slots[: lease.published_len].tolist())
            assert not shared & set(writable), f"another lease may write slots of lease {number}"
            await self.check_kv(number, lease)
        states = [lease.state_slot for lease, _ in self.held.values() if lease.state_slot is not None]
        assert len(states) == len(set(states)), "two leases have the same private state"
        windows = [slot for lease, _ in self.held.values() for slot in private_window(self.cache, lease)]
        assert len(windows) == len(set(windows)), "two leases have the same private window slot"

    async def check_kv(self, number: int, lease: Lease) -> None:
        private = lease.slots[lease.published_len :]
        arrays = await self.pools[lease.client].read_kv(lease, private)
        for layer, kind in enumerate(self.cache.kind.layer_kinds):
            if kind == "full":
                assert all((array[layer] == number).all() for array in arrays), f"lease {number} was overwritten"
        others = [slot for other, _ in self.held.values() if other is not lease for slot in other.slots.tolist()]
        if others:
            arrays = tuple(filled_kv(self.cache.kind, 1, 0))
            with pytest.raises(InvalidRequest, match="only slots that were not published yet"):
                await self.pools[lease.client].write_kv(lease, torch.tensor(others[:1]), *arrays)


def private_window(cache: CacheUnderTest, lease: Lease) -> list[int]:
    if not cache.kind.has_window:
        return []
    slots: list[int] = lease.swa_slots[lease.published_len :].tolist()
    return [slot for slot in slots if slot]


async def test_a_private_slot_belongs_to_one_lease(cache: CacheUnderTest) -> None:
    await Holders(cache).run(num_steps=50)


# ---------------------------------------------------------------- planted faults


def what_is_handed_out_stays_free(patch: Patch) -> None:
    alloc = TokenToKVPoolAllocator.alloc_pages

    def keep_free(allocator: TokenToKVPoolAllocator, num_pages: int) -> Any:
        starts = alloc(allocator, num_pages)
        allocator.free_pages(starts)
        return starts

    patch.setattr(TokenToKVPoolAllocator, "alloc_pages", keep_free)


def evictions_take_what_is_held(patch: Patch) -> None:
    free = KVCache._free_private

    def free_again(core: KVCache, lease: Any) -> None:
        with suppress(SlotError):
            free(core, lease)

    def take(core: KVCache, num_tokens: int, cause: str = "") -> int:
        for lease in core.leases:
            free_again(core, lease)
        return 0

    patch.setattr(KVCache, "_free_private", free_again)
    patch.setattr(KVCache, "evict", take)


@pytest.mark.parametrize(
    "plant",
    [what_is_handed_out_stays_free, evictions_take_what_is_held],
    ids=lambda plant: plant.__name__,
)
async def test_a_slot_of_two_is_seen(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    cache = unchecked(radix(4))

    with pytest.raises(AssertionError, match=r"another lease may write slots|writable by two leases"):
        await Holders(cache).run(num_steps=50)
