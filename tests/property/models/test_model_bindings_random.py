"""Random binding, retiring and serving by several clients, compared with a simple model of the rules.

Workers compute only in bound namespaces; they change their weights only where they retire the `lora_id` behind it.
Then no lease that a worker takes ever holds KV of other weights than its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from support.more import more
from support.reference.bindings import NAMES, SALTS, Client, Held, Name, ReferenceBindings, Refused

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.sessions import bound_models, model_bindings
from raydix.schemas import CacheConfig, ConfigMismatch, LeaseGrant, ModelFingerprint, PoolConfig

CONFIG = CacheConfig(pool=PoolConfig(num_slots=4096, device="cpu"))
OPERATIONS = dict(bind=5, acquire=7, lock=1, insert=7, release=4, grant=2, adopt=3)  # noqa: C408 -- a line each
RARE = dict(retire=0.4, retire_salt=0.3, reset=0.15, push=0.4, set_weights=0.4, lose_session=0.3)  # noqa: C408
NUM_WORKERS, MOST = 3, 3


class Traffic:
    """One cache, its workers, one scheduler that binds nothing, and the same in the reference."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.cache = LocalPrefixCache(CONFIG)
        self.real = [PrefixCacheClient(self.cache) for _ in range(NUM_WORKERS + 1)]
        self.plain = [Client(dict.fromkeys(NAMES, f"{number % 2}")) for number in range(NUM_WORKERS + 1)]
        self.reference = ReferenceBindings(MOST, self.plain)
        self.leases: dict[int, Lease] = {}
        self.grants: list[tuple[int, Client, LeaseGrant]] = []
        self.generations: set[int] = set()
        self.seen: Counter[str] = Counter()

    async def run(self, num_operations: int) -> None:
        for done in range(num_operations):
            (name,) = self.rng.choices([*OPERATIONS, *RARE], [*OPERATIONS.values(), *RARE.values()])
            await getattr(self, name)(self.rng.randrange(NUM_WORKERS + 1))
            if done % 16 == 0:
                await self.check()
        for client in (*self.real, self.cache):
            await client.close()

    async def check(self) -> None:
        await self.cache.check_invariants()
        stats, weights = await self.cache.stats(), await self.cache.weights()
        assert (stats.bindings, stats.weights) == (len(self.reference.models), self.reference.label)
        assert (weights.label, weights.generation) == (self.reference.label, self.reference.generation)
        for space, cached in self.reference.cached.items():
            tokens = max(cached, key=len)
            assert (await self.cache.match(tokens, lora_id=space[0], cache_salt=space[1])).prefix_len == len(tokens)

    def is_scheduler(self, who: int) -> bool:
        return who == NUM_WORKERS

    async def bind(self, who: int) -> None:
        name = self.rng.choice(NAMES)
        if self.is_scheduler(who):
            return
        fingerprint = ModelFingerprint(fields={"size": 1}, weights=self.plain[who].weights[name])
        known = set(self.generations)
        try:
            expected = self.reference.bind(self.plain[who], name)
        except Refused:
            with pytest.raises(ConfigMismatch, match="weights") as refused:
                await self.real[who].bind_model(fingerprint, lora_id=name)
            self.seen["label refused" if "(set_weights)" in str(refused.value) else "bind refused"] += 1
        else:
            generation = await self.real[who].bind_model(fingerprint, lora_id=name)
            assert generation == expected
            assert generation in known or generation > max(known, default=0)
            self.generations.add(generation)

    async def acquire(self, who: int, verb: str = "acquire") -> None:
        space = self.rng.choice(NAMES), self.rng.choice(SALTS)
        tokens = tuple(self.rng.choices((1, 2), k=self.rng.randint(1, 4)))
        call = getattr(self.real[who], verb)(tokens, lora_id=space[0], cache_salt=space[1])
        try:
            number, held = self.reference.acquire(self.plain[who], space, tokens)
        except Refused:
            with pytest.raises(ConfigMismatch, match="Bind again"):
                await call
            self.seen[f"{verb} refused"] += 1
            return
        lease = self.leases[number] = await call
        assert lease.prefix_len == len(held.labels)
        self.check_weights(who, held)
        if verb == "lock":
            held.tokens = tokens[: len(held.labels)]

    async def lock(self, who: int) -> None:
        await self.acquire(who, "lock")

    def check_weights(self, who: int, held: Held) -> None:
        """Check that the KV of a hit was computed by the worker's own weights."""
        client, name = self.plain[who], held.space[0]
        if name in client.bound:
            assert set(held.labels) <= {client.weights[name]}
            self.seen["served"] += bool(held.labels)

    def computed_by(self, who: int) -> list[int]:
        """The leases that a client can go on with."""
        client, offered = self.plain[who], {number for number, _, _ in self.grants}
        return [number for number, held in client.leases.items() if number not in offered and held.tokens]

    async def insert(self, who: int) -> None:
        client = self.plain[who]
        mine = [number for number in self.computed_by(who) if client.leases[number].space[0] in client.bound]
        if mine:
            number = self.rng.choice(mine)
            held = client.leases[number]
            done = await self.leases[number].insert(held.tokens)
            assert done.retired is not self.reference.insert(client, number)
            self.seen["retired"] += done.retired

    async def release(self, who: int) -> None:
        if mine := self.computed_by(who):
            number = self.rng.choice(mine)
            await self.leases.pop(number).release()
            del self.plain[who].leases[number]

    async def grant(self, who: int) -> None:
        if mine := self.computed_by(who):
            number = self.rng.choice(mine)
            self.grants.append((number, self.plain[who], await self.leases[number].grant()))

    async def adopt(self, who: int) -> None:
        if not self.grants:
            return
        place = self.rng.randrange(len(self.grants))
        number, granter, grant = self.grants[place]
        try:
            held = self.reference.adopt(self.plain[who], granter, number)
        except Refused:
            with pytest.raises(ConfigMismatch) as refused:
                await self.real[who].adopt(grant)
            self.seen["outdated" if "Acquire again" in str(refused.value) else "adopt refused"] += 1
        else:
            del self.grants[place]
            self.leases[number] = await self.real[who].adopt(grant)
            self.check_weights(who, held)

    async def retire(self, who: int) -> None:
        name = self.rng.choice(NAMES[1:])
        self.reference.retire(name, None)
        await self.real[who].retire(lora_id=name)

    async def retire_salt(self, who: int) -> None:
        name = self.rng.choice(NAMES)
        self.reference.retire(name, "s")
        await self.real[who].retire(lora_id=name, cache_salt="s")

    async def reset(self, who: int) -> None:
        self.reference.reset()
        await self.real[who].reset()

    async def push(self, who: int) -> None:
        """New weights for one worker, in the order that there is for it; others keep theirs."""
        name: Name = self.rng.choice(NAMES)
        client = self.plain[who]
        await self.stop_requests(who, name)
        client.weights[name] = self.rng.choice("012")
        if name is None:
            await self.reset(who)
        else:
            self.reference.retire(name, None)
            await self.real[who].retire(lora_id=name)

    async def stop_requests(self, who: int, name: Name) -> None:
        client = self.plain[who]
        for number in [number for number, held in client.leases.items() if held.space[0] == name]:
            if number not in {offered for offered, _, _ in self.grants}:
                await self.leases.pop(number).release()
                del client.leases[number]

    async def set_weights(self, who: int) -> None:
        """New weights of the base for some workers and, in one step, in the cache; the others keep theirs, behind."""
        label = self.rng.choice("012")
        if label != self.reference.label:
            for each in self.rng.sample(range(NUM_WORKERS), self.rng.randint(0, NUM_WORKERS)):
                await self.stop_requests(each, None)
                self.plain[each].weights[None] = label
        expected = self.reference.set_weights(label)
        assert await self.real[who].set_weights(label) == expected
        self.generations.add(expected)

    async def lose_session(self, who: int) -> None:
        """As if the client had been silent: its leases end, and it has bound nothing any more."""
        client, real = self.plain[who], self.real[who]
        await real.open()
        self.cache._host.service.reaper.owner_unavailable(real.session.session_id, is_dead=True)
        await real.stats()  # in another session
        self.grants = [each for each in self.grants if each[1] is not client]
        client.leases.clear()
        client.bound = dict.fromkeys(client.bound, 0)


@pytest.mark.parametrize("seed", [*range(4), *more(*range(4, 16))])
def test_clients_bind_retire_and_serve_as_the_rules_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bindings, "MAX_BINDINGS", MOST)  # of four names: the oldest goes at times
    traffic = Traffic(Random(seed))

    asyncio.run(traffic.run(3_000))

    refused = ("label refused", "bind refused", "acquire refused", "lock refused", "adopt refused")
    every = (*refused, "outdated", "served", "retired")
    assert all(traffic.seen[each] for each in every), traffic.seen
    assert bound_models.MAX_BINDINGS > len(NAMES)  # a session's own are not forgotten here
