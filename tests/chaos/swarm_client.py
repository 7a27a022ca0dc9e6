"""One process of the swarm: coroutines that compute, publish, grant and read KV of other processes.

    python swarm_client.py ADDRESS FOLDER PLACE SEED

runs a driver; `SwarmActor` does the same in a Ray actor with a watched death.
"""

from __future__ import annotations

import asyncio
import os
import sys
from random import Random
from zlib import crc32

import ray
import torch
from shared_counters import DETAILS, IDLE, NUM_PLACES, OUTCOMES, PID, WAITING, WRITING, Board, Mailbox

from raydix.actors import AttachedPool, Lease, PrefixCacheClient, WatchedActor
from raydix.actors.client.connectors import RayConnector
from raydix.actors.transport.transport import Transport
from raydix.schemas import CacheUnavailable, LeaseGrant, Message

CACHE = "swarm"
NUM_LAYERS = 2
NUM_COROUTINES = 4
REQUESTS_PER_SESSION = 25  # of each coroutine

COMPARED, GRANTED, ADOPTED, LOST, SESSIONS = DETAILS


def stamped_kv(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KV that identifies all tokens up to its own, `[NUM_LAYERS, len(tokens), 1, 1]` each."""
    stamps, digest = [], 0
    for token in tokens:
        digest = crc32(bytes([token]), digest)
        stamps.append(digest % 2**20)
    row = torch.tensor(stamps, dtype=torch.float32)
    k = torch.stack([row + layer for layer in range(NUM_LAYERS)])[:, :, None, None]
    return k, -k


class BoardedConnector(RayConnector):
    """A connection to the cache that counts its client's waiting requests on the board."""

    def __init__(self, board: Board, place: int) -> None:
        super().__init__(CACHE)
        self._board, self._place = board, place

    def make_transport(self) -> Transport:
        transport = super().make_transport()
        wait = transport.wait

        async def wait_on_board(ticket: int) -> Message:
            with self._board.doing(self._place, WAITING):
                return await wait(ticket)

        transport.wait = wait_on_board  # type: ignore[method-assign]
        return transport


class SwarmClient:
    """Works at one place of the swarm until the board is closed, in one session after another."""

    def __init__(self, folder: str, place: int, seed: int) -> None:
        self._board, self._mailbox, self._place = Board(folder), Mailbox(folder), place
        self._rng = Random(seed)
        self._maps = self._rng.random() < 0.7  # others copy
        self._client: PrefixCacheClient
        self._pool: AttachedPool | None = None

    async def work(self) -> None:
        """Run requests that are refused, cancelled or served, and compare each hit."""
        while not self._board.closed:
            self._client, self._pool = PrefixCacheClient(CACHE), None
            self._client.session.connector = BoardedConnector(self._board, self._place)
            try:
                async with self._client:
                    self._board.add(self._place, SESSIONS)
                    self._board[self._place, PID] = os.getpid()
                    await asyncio.gather(*[self._requests() for _ in range(NUM_COROUTINES)])
                    await self._hold_on()
            except CacheUnavailable:
                await asyncio.sleep(0.05)  # it restarts

    async def _hold_on(self) -> None:
        """Keep the session after the last request, so that any slots it still held would be seen."""
        self._board[self._place, IDLE] = self._board.stopped
        while self._board.stopped and not self._board.closed:  # noqa: ASYNC110 -- another process closes it
            await asyncio.sleep(0.02)

    async def _requests(self) -> None:
        for _ in range(REQUESTS_PER_SESSION):
            if self._board.stopped:
                return
            restarts = self._board.restarts
            task = asyncio.ensure_future(self._request())
            if self._rng.random() < 0.1:
                await asyncio.wait((task,), timeout=self._rng.random() * 0.05)
                task.cancel()
            await asyncio.wait((task,))
            self._count(task, restarts)
            await asyncio.sleep(0.05 * (self._board.restarts % 2))

    def _count(self, task: asyncio.Task[None], restarts: int) -> None:
        """Count how an operation ended; an unexpected error is a fault."""
        if task.cancelled():
            return self._board.add(self._place, "cancelled")
        error = task.exception()
        outcome = "served" if error is None else type(error).__name__
        if outcome not in OUTCOMES or "AssertionError" in str(error):
            task.result()
            raise AssertionError(f"a request ended with {error!r}")
        self._board.add(self._place, outcome)
        was_up = restarts % 2 == 0 and restarts == self._board.restarts
        if was_up and isinstance(error, CacheUnavailable) and "RpcError" in str(error):
            self._board.add(self._place, LOST)
        return None

    async def _request(self) -> None:
        rng = self._rng
        letter = self._mailbox.take()
        if letter is not None:
            tokens, lease = await self._adopted(letter)
        else:
            group = [token for _ in range(rng.randint(1, 3)) for token in [rng.randint(1, 3)] * 4]
            tokens = group + [rng.randint(1, 9) for _ in range(rng.randint(1, 20))]
            lease = await self._client.acquire(tokens)
        async with lease:
            if letter is None and rng.random() < 0.2:
                grant = await lease.grant()
                self._mailbox.put((tokens, grant))
                self._board.add(self._place, GRANTED)
                return
            await self._compute(lease, tokens)
            await lease.insert(tokens)
            if rng.random() < 0.3:
                await lease.extend(4)
            if rng.random() < 0.05:
                await self._client.evict(16)

    async def _adopted(self, letter: tuple[list[int], LeaseGrant]) -> tuple[list[int], Lease]:
        tokens, grant = letter
        try:
            lease = await self._client.adopt(grant)
        except (asyncio.CancelledError, CacheUnavailable):
            self._mailbox.put(letter)  # it may still be the granter's
            raise
        self._board.add(self._place, ADOPTED)
        return tokens, lease

    async def _compute(self, lease: Lease, tokens: list[int]) -> None:
        """Compare the hit and write the rest, layer by layer, as a model would."""
        pool = await self._attached(lease)
        k, v = stamped_kv(tokens)
        hit, start = lease.slots[: lease.published_len], lease.published_len
        rest = lease.slots[start : len(tokens)]
        if not pool.mapped:
            compare(tokens, *await pool.read_kv(lease, hit))
            with self._board.doing(self._place, WRITING):
                await pool.write_kv(lease, rest, k[:, start:], v[:, start:])
        else:
            await self._compare_mapped(pool, lease, tokens, hit)
            with self._board.doing(self._place, WRITING):
                for layer in range(NUM_LAYERS):
                    pool.write(layer, rest, k[layer, start:], v[layer, start:])
                    await asyncio.sleep(self._rng.random() * 0.01)
        self._board.add(self._place, COMPARED, len(hit))

    async def _compare_mapped(self, pool: AttachedPool, lease: Lease, tokens: list[int], hit: torch.Tensor) -> None:
        """Compare the mapped KV. On a difference, read through the cache, which raises if the lease has expired
        meanwhile."""
        found = [pool.gather(layer, hit) for layer in range(NUM_LAYERS)]
        try:
            compare(tokens, torch.stack([k for k, _ in found]), torch.stack([v for _, v in found]))
        except AssertionError:
            await pool.read_kv(lease, hit)
            raise

    async def _attached(self, lease: Lease) -> AttachedPool:
        if self._pool is None or self._pool.lost or self._pool.epoch != lease.epoch:
            self._pool = await self._client.attach_pool(mapped=self._maps)
        return self._pool


def compare(tokens: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise AssertionError unless this KV was computed from the first of these tokens."""
    right_k, right_v = (right[:, : k.shape[1]] for right in stamped_kv(tokens))
    if not (torch.equal(k, right_k) and torch.equal(v, right_v)):
        raise AssertionError(f"{tokens[: k.shape[1]]} reads {k.flatten()}, not {right_k.flatten()}")


class SwarmActor(WatchedActor):
    """A `SwarmClient` in an actor."""

    async def work(self, folder: str, place: int, seed: int) -> None:
        await SwarmClient(folder, place, seed).work()


def main(address: str, folder: str, place: str, seed: str) -> None:
    """Run a driver of the Ray cluster at an address."""
    assert int(place) < NUM_PLACES
    ray.init(address=address, log_to_driver=False)
    asyncio.run(SwarmClient(folder, int(place), int(seed)).work())
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
