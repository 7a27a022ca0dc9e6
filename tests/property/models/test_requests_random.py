"""Random requests on the real allocators: a match finds the KV of exactly these tokens, and no slot is lost.

Each slot's memory holds a fingerprint of the prefix up to its token, in both halves; so does each state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.more import more

from raydix.cache_core import (
    MambaPool,
    MambaRadixCache,
    RadixCache,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.components.window_kv import WindowKV

NUM_PAGES = 40
NUM_STATES = 12
MAX_RUNNING = 5
NUM_STEPS = 2000


def fingerprints(tokens: list[int]) -> list[int]:
    """One for each prefix."""
    prints, now = [], 7
    for token in tokens:
        now = (now * 1_000_003 + token) % (2**61 - 1)
        prints.append(now)
    return prints


@dataclass(eq=False)
class Request:
    """The slots and locks of a running request."""

    tokens: list[int]
    node: Any  # where its match ended, locked
    receipt: Any
    pages: np.ndarray[Any, Any]  # its own, beyond the match
    state: int | None = None
    windowless: int = 0  # leading tokens with released window halves
    prints: list[int] = field(default_factory=list)


class Server:
    """Requests come, match, compute, give windows up, and publish."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = Random(f"{seed}/{page_size}")
        self.page_size = page_size
        self.running: list[Request] = []
        self.texts: list[list[int]] = []

    cache: RadixCache | MambaRadixCache
    allocator: TokenToKVPoolAllocator

    def step(self) -> None:
        if len(self.running) < MAX_RUNNING and self.rng.random() < 0.6:
            self.start()
        elif self.running:
            request = self.rng.choice(self.running)
            if self.rng.random() < 0.3:
                self.go_on(request)
            else:
                self.running.remove(request)
                self.finish(request)
        if self.rng.random() < 0.1:
            self.cache.evict(self.rng.randint(0, 4 * self.page_size), self.rng.randint(0, 4 * self.page_size))
        self.check()

    def text(self) -> list[int]:
        """As other texts for a while, then its own."""
        base = self.rng.choice(self.texts) if self.texts and self.rng.random() < 0.8 else []
        head = base[: self.rng.choice([len(base), self.rng.randint(0, len(base))])]
        length = min(12, len(head) // self.page_size + self.rng.randint(1, 5)) * self.page_size
        text = (head + [self.rng.randint(1, 3) for _ in range(length)])[:length]
        self.texts = [*self.texts[-9:], text]
        return text

    def start(self) -> None:
        tokens = self.text()
        found = self.cache.match_pages(RadixKey(tokens))
        receipt = self.cache.inc_lock_ref(found.last_node)
        missing = len(tokens) - found.prefix_len
        if not self.make_room(missing):
            self.cache.dec_lock_ref(found.last_node, receipt)
            return
        pages = self.allocator.alloc_pages(missing // self.page_size)
        request = Request(tokens, found.last_node, receipt, pages, prints=fingerprints(tokens))
        self.read(request, found.starts)
        self.write(request, self.expand(pages), found.prefix_len)
        self.running.append(request)

    def expand(self, starts: Any) -> np.ndarray[Any, Any]:
        return (starts[:, None] + np.arange(self.page_size)).reshape(-1)

    def finish(self, request: Request) -> None:
        if self.rng.random() < 0.9:
            self.publish(request)
        self.allocator.free_pages(request.pages)
        self.cache.dec_lock_ref(request.node, request.receipt)

    def publish(self, request: Request) -> Any:
        """Insert, and keep of the pages what the tree did not take."""
        result = self.cache.insert_pages(
            RadixKey(request.tokens), request.pages, request.node, swa_evicted_seqlen=request.windowless
        )
        size = (result.prefix_len - request.node.end) // self.page_size
        mine = request.pages[:size]
        request.pages = mine[mine != result.existing[:size]]
        return result

    def check(self) -> None:
        self.cache.check_invariants()
        self.allocator.check_invariants()
        owners = [*self.cache.tree_starts(), *(request.pages for request in self.running), self.allocator.free_starts()]
        pages = sorted(np.concatenate(owners).tolist())
        assert pages == [self.page_size * number for number in range(1, NUM_PAGES + 1)]

    def drain(self) -> None:
        """After the last request all can be evicted."""
        while self.running:
            self.finish(self.running.pop())
        self.cache.evict(10**6, 10**6)
        assert self.cache.total_size() == 0
        assert self.allocator.available_size() == NUM_PAGES * self.page_size
        self.check()

    def make_room(self, num_tokens: int) -> bool:
        raise NotImplementedError

    def read(self, request: Request, starts: Any) -> None:
        raise NotImplementedError

    def write(self, request: Request, slots: Any, at: int) -> None:
        raise NotImplementedError

    def go_on(self, request: Request) -> None:
        raise NotImplementedError


class SwaServer(Server):
    """With a window."""

    def __init__(self, seed: int, page_size: int, window: int) -> None:
        super().__init__(seed, page_size)
        self.window = window
        self.swa_allocator = SWATokenToKVPoolAllocator(NUM_PAGES * page_size, NUM_PAGES * 3 // 4 * page_size, page_size)
        self.allocator = self.swa_allocator
        self.swa_cache = RadixCache(page_size, window, self.allocator)
        self.cache = self.swa_cache
        self.full = [0] * (NUM_PAGES + 1) * page_size
        self.swa = [0] * (NUM_PAGES + 1) * page_size

    def halves(self, slots: Any) -> list[int]:
        halves: list[int] = self.swa_allocator.swa_slots(torch.from_numpy(slots)).tolist()
        return halves

    def make_room(self, num_tokens: int) -> bool:
        full = num_tokens - self.allocator.available_size()
        swa = num_tokens - self.swa_allocator.swa_available_size()
        self.cache.evict(max(0, full), max(0, swa))
        return self.swa_allocator.can_alloc(num_tokens)

    def write(self, request: Request, slots: Any, at: int) -> None:
        for slot, half, each in zip(slots.tolist(), self.halves(slots), request.prints[at:], strict=True):
            self.full[slot] = self.swa[half] = each

    def read(self, request: Request, starts: Any) -> None:
        slots = self.expand(starts)
        assert [self.full[slot] for slot in slots] == request.prints[: len(slots)]
        tail = slots[-self.window :]
        halves = self.halves(tail)
        assert 0 not in halves
        assert [self.swa[half] for half in halves] == request.prints[: len(slots)][-self.window :]

    def go_on(self, request: Request) -> None:
        """Decoding has left the first pages behind."""
        start = len(request.tokens) - len(request.pages) * self.page_size
        end = len(request.tokens) - self.rng.randint(0, 2) * self.page_size
        if request.windowless == 0 and end > start:
            self.swa_allocator.free_swa_pages(request.pages[: (end - start) // self.page_size])
            request.windowless = end
            self.swa_cache.release_window(request.node, request.receipt)

    def check(self) -> None:
        super().check()
        for node in self.swa_cache.parts.tree.nodes():
            halves = self.halves(node.value.numpy())
            assert all(half == 0 for half in halves) if node.swa_tombstone else 0 not in halves

    def drain(self) -> None:
        super().drain()
        assert self.swa_allocator.swa_available_size() == self.swa_allocator.num_swa_slots


class MambaServer(Server):
    """With states, each request on a copy of its own."""

    def __init__(self, seed: int, page_size: int) -> None:
        super().__init__(seed, page_size)
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * page_size, page_size)
        self.states = MambaPool(NUM_STATES, [[(1,)]], dtype=torch.int64)
        self.mamba = MambaRadixCache(page_size, self.allocator, self.states)
        self.cache = self.mamba
        self.rows = self.states.layers[0][0]

    def make_room(self, num_tokens: int) -> bool:
        full, states = num_tokens - self.allocator.available_size(), 1 - self.states.available_size()
        self.cache.evict(max(0, full), max(0, states))
        return self.allocator.can_alloc(num_tokens) and self.states.available_size() > 0

    def read(self, request: Request, starts: Any) -> None:
        request.state = self.states.alloc_track_slot()
        if request.node.end:
            self.states.copy_states(request.node.mamba_value, request.state)
            assert self.rows[request.state].item() == request.prints[request.node.end - 1]
        else:
            self.states.clear_state(request.state)

    def write(self, request: Request, slots: Any, at: int) -> None:
        assert request.state is not None
        self.rows[request.state] = request.prints[-1]

    def go_on(self, request: Request) -> None:
        """Publish the computed tokens, and hold them in place of the matched prefix."""
        if len(request.pages) and self.states.available_size():
            kept = self.states.alloc_track_slot()
            self.states.copy_states(request.state or 0, kept)
            result = self.publish(request)
            self.allocator.free_pages(request.pages)
            if self.mamba.attach_state(result.last_node, kept):
                self.states.free_track_slot(kept)
            receipt = self.cache.inc_lock_ref(result.last_node)
            self.cache.dec_lock_ref(request.node, request.receipt)
            request.node, request.receipt, request.pages = result.last_node, receipt, request.pages[:0]

    def finish(self, request: Request) -> None:
        assert request.state is not None
        assert self.rows[request.state].item() == request.prints[-1]
        result = self.publish(request)
        if self.mamba.attach_state(result.last_node, request.state):
            self.states.free_track_slot(request.state)
        self.allocator.free_pages(request.pages)
        self.cache.dec_lock_ref(request.node, request.receipt)

    def check(self) -> None:
        super().check()
        self.states.check_invariants()
        held = len(self.mamba.mamba_lru) + len(self.running) + self.states.available_size()
        assert held == NUM_STATES

    def drain(self) -> None:
        super().drain()
        assert self.states.available_size() == NUM_STATES


class HybridServer(MambaServer, SwaServer):
    """With both."""

    def __init__(self, seed: int, page_size: int, window: int) -> None:
        SwaServer.__init__(self, seed, page_size, window)
        self.states = MambaPool(NUM_STATES, [[(1,)]], dtype=torch.int64)
        self.mamba = MambaRadixCache(page_size, self.allocator, self.states, sliding_window_size=window)
        self.cache = self.swa_cache = self.mamba
        self.rows = self.states.layers[0][0]

    def step(self) -> None:
        if self.rng.random() < 0.1:
            self.mamba.evict(0, 0, self.rng.randint(1, 2))
        super().step()

    def make_room(self, num_tokens: int) -> bool:
        if not self.states.available_size():
            self.mamba.evict(0, 0, 1)
        return SwaServer.make_room(self, num_tokens) and self.states.available_size() > 0

    def read(self, request: Request, starts: Any) -> None:
        SwaServer.read(self, request, starts)
        MambaServer.read(self, request, starts)

    def write(self, request: Request, slots: Any, at: int) -> None:
        SwaServer.write(self, request, slots, at)
        MambaServer.write(self, request, slots, at)

    def go_on(self, request: Request) -> None:
        (SwaServer if self.rng.random() < 0.5 else MambaServer).go_on(self, request)


@pytest.mark.parametrize(("page_size", "window"), [(4, 3), (16, 16), *more((1, 3), (4, 10))])
def test_requests_with_a_window_read_their_own_kv_and_lose_no_slot(page_size: int, window: int) -> None:
    server = SwaServer(1, page_size, window)
    for _ in range(NUM_STEPS):
        server.step()

    server.drain()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_with_states_read_their_own_and_lose_none(page_size: int) -> None:
    server = MambaServer(1, page_size)
    for _ in range(NUM_STEPS):
        server.step()

    server.drain()


@pytest.mark.parametrize(("page_size", "window"), [(16, 16), *more((1, 3), (4, 10))])
def test_requests_with_a_window_and_states_read_their_own_and_lose_nothing(page_size: int, window: int) -> None:
    server = HybridServer(1, page_size, window)
    for _ in range(NUM_STEPS):
        server.step()

    server.drain()


def keep_mapping(allocator: SWATokenToKVPoolAllocator, starts: Any) -> None:
    """`free_swa_pages` that forgets to clear what it freed."""
    allocator.swa.free_pages(allocator.swa_starts(starts))


def test_a_mapping_that_outlives_its_window_half_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SWATokenToKVPoolAllocator, "free_swa_pages", keep_mapping)
    server = SwaServer(1, 4, 10)

    with pytest.raises(AssertionError):
        for _ in range(NUM_STEPS):
            server.step()


def test_a_state_that_is_used_without_its_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowKV, "usable", lambda swa, path, end, count: count)
    server = HybridServer(1, 4, 10)

    with pytest.raises(AssertionError):
        for _ in range(NUM_STEPS):
            server.step()


def test_a_state_that_is_not_copied_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaPool, "copy_states", lambda pool, src, dst: None)
    server = MambaServer(1, 1)

    with pytest.raises(AssertionError):
        for _ in range(NUM_STEPS):
            server.step()
