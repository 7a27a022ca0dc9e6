"""`ToyEngine`: an engine that schedules as vLLM does, with KV that shows for which tokens it was computed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import torch

from raydix.actors import PrefixCacheClient
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.engines.block_copies import BlockCopies
from raydix.actors.engines.cache_link import CacheLink, close_links
from raydix.actors.engines.engine_kv import EngineKV, segments_of
from raydix.actors.engines.scheduler_side import ScheduledRequest, SchedulerSide
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.step_messages import StepReport
from raydix.actors.engines.transfer_counts import TransferCounts
from raydix.actors.engines.worker_side import WorkerSide
from raydix.schemas.engine_namespace import CacheNamespace

BLOCK = 16
NUM_LAYERS, NUM_HEADS, CONTENT = 2, 2, 4
_START_S = 30.0


def toy_kv(rank: int = 0, *, keeps_blocks: bool = True) -> EngineKV:
    fields = {"model": "toy", "rank": rank}
    layers = ((f"layer {number}", "float32", (NUM_HEADS, CONTENT)) for number in range(NUM_LAYERS))
    return EngineKV(BLOCK, segments_of(layers), fields, keeps_blocks)


def kv_of(tokens: Sequence[int], seed: int) -> torch.Tensor:
    """The KV of each token, which depends on all tokens before it and on the weights: one float32 each."""
    values, state = [], seed + 1
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % 16_777_213
        values.append(float(state))
    return torch.tensor(values)


@dataclass(eq=False)
class ToyRequest:
    request_id: str
    tokens: list[int]
    num_new: int
    namespace: CacheNamespace
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_hit: int = 0
    num_recomputed: int = 0
    state: str = "waiting"  # "loading", "running", "finished"
    is_loaded: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class ToyEngine:
    """An engine: a scheduler, and a worker for each rank.

    Args:
        make_clients: for each rank, makes a client of its cache.
        loop: where all clients run, as caches in this process need it; None: one for each side, as in an engine.
        device: of the KV caches.
    """

    def __init__(
        self,
        make_clients: Sequence[Callable[[], PrefixCacheClient]],
        *,
        loop: LoopThread | None = None,
        num_blocks: int = 64,
        chunk: int = 64,
        reads: bool = True,
        keeps_blocks: bool = True,
        seed: int = 0,
        start_s: float = _START_S,
        device: str = "cpu",
        **settings: object,
    ) -> None:
        self.settings = EngineSettings.of({"cache": "kv", "lookup_timeout_ms": 5000, **settings})
        self.counts = TransferCounts()
        self.seed = seed  # of the weights
        self.num_wrong = 0  # tokens that were computed with wrong KV behind them
        self.chunk = chunk
        self.free = list(range(1, num_blocks))  # block 0 is the null block
        self.held: dict[str, ToyRequest] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.loading: dict[str, ToyRequest] = {}
        self.num_resets = 0
        self._numbers = count()
        self._ranks = range(len(make_clients))
        self._loops = [loop or LoopThread("toy-scheduler"), *(loop or LoopThread("toy-worker") for _ in self._ranks)]
        kvs = [toy_kv(rank, keeps_blocks=keeps_blocks) for rank in self._ranks]

        def make_link(rank: int, on: LoopThread, maps_pool: bool) -> CacheLink:
            return CacheLink(
                f"kv-tp{rank}",
                make_clients[rank],
                kvs[rank].fingerprint,
                partial(kvs[rank].check_config, check=self.settings.check),
                label=self.settings.weights,
                loop=on,
                maps_pool=maps_pool,
                reconnect_s=self.settings.reconnect_s,
            )

        self.links = [make_link(rank, self._loops[0], False) for rank in self._ranks]
        self.worker_links = [make_link(rank, self._loops[1 + rank], True) for rank in self._ranks]
        shape = (num_blocks, NUM_HEADS, BLOCK, CONTENT)
        self.kv = [[torch.zeros(shape, device=device) for _ in range(NUM_LAYERS)] for _ in self._ranks]
        for link in [*self.links, *self.worker_links]:
            link.start(start_s)
        self.scheduler = SchedulerSide(
            self.settings, self.links, self._loops[0], BLOCK, reads=reads, counts=self.counts
        )
        self.workers = [
            WorkerSide(
                self.settings,
                rank,
                self.worker_links[rank],
                self._loops[1 + rank],
                BlockCopies(self.kv[rank], BLOCK, check=self.settings.check),
                BLOCK,
                keeps_blocks=keeps_blocks,
                counts=self.counts,
            )
            for rank in self._ranks
        ]

    # ---------------------------------------------------------------- requests

    def add(
        self,
        tokens: Sequence[int],
        num_new: int = 1,
        namespace: CacheNamespace | None = None,
        request_id: str | None = None,
    ) -> ToyRequest:
        name = request_id or f"r{next(self._numbers)}"
        request = ToyRequest(name, list(tokens), num_new, namespace or CacheNamespace(), len(tokens))
        self.waiting.append(request)
        self.scheduler.add_request(request.request_id, lambda start, end: request.tokens[start:end], request.namespace)
        return request

    def run(self, tokens: Sequence[int], num_new: int = 1, namespace: CacheNamespace | None = None) -> ToyRequest:
        request = self.add(tokens, num_new, namespace)
        self.run_all()
        return request

    def run_all(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not (self.waiting or self.running or self.loading or self.held):
                self.step()  # sends the ends of requests to the workers
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def abort(self, request: ToyRequest) -> None:
        if request.state == "finished":
            return
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        is_loading = request.request_id in self.loading
        request.state = "finished"
        holds = self.scheduler.finish_request(request.request_id)
        assert not (holds and is_loading)
        if holds:
            self.held[request.request_id] = request
        elif not is_loading:
            self._free_blocks(request)

    def reset(self, seed: int | None = None) -> None:
        """Preempt all requests, and reset the connector: weights may have changed."""
        if seed is not None:
            self.seed = seed
        for request in [*self.running]:
            self._preempt(request)
        for request in self.waiting:
            if request.num_computed:  # it was loaded, and waits for room
                self._free_blocks(request)
                request.num_computed, request.num_hit, request.is_loaded = 0, 0, False
        self.num_resets += 1
        self.scheduler.reset()

    @property
    def is_settled(self) -> bool:
        """Whether the scheduler and all workers have carried out the latest reset."""
        return all(link.order_done == self.num_resets for link in [*self.links, *self.worker_links])

    def _preempt(self, request: ToyRequest) -> None:
        self.running.remove(request)
        self._free_blocks(request)
        request.num_computed, request.state = 0, "waiting"
        self.waiting.insert(0, request)

    def _free_blocks(self, request: ToyRequest) -> None:
        self.free.extend(request.blocks)
        request.blocks = []

    # ---------------------------------------------------------------- a step

    def step(self) -> None:
        preempted: set[str] = set()
        scheduled: list[tuple[ToyRequest, int]] = []
        for request in [*self.running]:
            if request not in self.running:
                continue
            number = min(self.chunk, len(request.tokens) - request.num_computed)
            while not self._has_blocks(request, request.num_computed + number) and request in self.running:
                victim = self.running[-1]
                self._preempt(victim)
                preempted.add(victim.request_id)
                scheduled = [each for each in scheduled if each[0] is not victim]
            if request in self.running:
                scheduled.append((request, number))
        if not preempted:
            self._admit(scheduled)
        plan = self.scheduler.plan_step(
            [
                ScheduledRequest(each.request_id, each.num_computed + number, partial(list, each.blocks))
                for each, number in scheduled
            ],
            preempted,
            is_idle=not scheduled,
            num_prompt_tokens=sum(number for _, number in scheduled if number > 1),
        )
        for worker in self.workers:
            worker.before_step(plan)
            worker.begin_step(plan)
        for request, number in scheduled:
            self._compute(request, number)
        for worker in self.workers:
            worker.end_step(is_idle=not scheduled)
        if not scheduled:
            time.sleep(0.001)  # as long as an empty step of a real engine, at least
        self._read_results(scheduled)

    def _has_blocks(self, request: ToyRequest, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop(0))
        return True

    def _admit(self, scheduled: list[tuple[ToyRequest, int]]) -> None:
        for request in sorted(self.waiting, key=lambda each: not each.is_loaded):  # loaded ones hold blocks
            if not request.is_loaded:
                hit = self.scheduler.find_hit(request.request_id, len(request.tokens), 0)
                if hit is None:
                    continue
                if hit:
                    if not self._fits_beside_loads(request) or not self._has_blocks(request, hit):
                        break
                    self.scheduler.allocate(request.request_id, hit, request.blocks)
                    request.num_hit = hit
                    self.waiting.remove(request)
                    request.state = "loading"
                    self.loading[request.request_id] = request
                    continue
            number = min(self.chunk, len(request.tokens) - request.num_computed)
            if not self._has_blocks(request, request.num_computed + number):
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.state, request.is_loaded = "running", False
            scheduled.append((request, number))

    def _fits_beside_loads(self, request: ToyRequest) -> bool:
        """Whether all requests that load or have loaded can compute their prompts: they keep their blocks meanwhile."""
        loads = [*self.loading.values(), *(each for each in self.waiting if each.is_loaded), request]
        return sum(-(-(len(each.tokens) + 1) // BLOCK) - len(each.blocks) for each in loads) <= len(self.free)

    def _compute(self, request: ToyRequest, number: int) -> None:
        """Check the KV before the new tokens, and write theirs."""
        start, end = request.num_computed, request.num_computed + number
        values = kv_of(request.tokens[:end], self.seed).to(self.kv[0][0].device)
        slots = np.asarray(request.blocks)[np.arange(end) // BLOCK], np.arange(end) % BLOCK
        for rank in self._ranks:
            for number_of_layer, layer in enumerate(self.kv[rank]):
                offset = 100 * rank + number_of_layer
                before = layer[slots[0][:start], :, slots[1][:start]]
                self.num_wrong += int((before != (values[:start] + offset)[:, None, None]).any(-1).any(-1).sum())
                layer[slots[0][start:], :, slots[1][start:]] = (values[start:] + offset)[:, None, None]

    def _read_results(self, scheduled: list[tuple[ToyRequest, int]]) -> None:
        results = [worker.take_results() for worker in self.workers]
        reports = [report for worker in self.workers if (report := worker.take_report())]
        bad_blocks = set().union(*(failed for _, _, failed in results))
        for request, number in scheduled:
            request.num_computed += number
            request.num_recomputed += number
            if request.num_computed == len(request.tokens):
                if len(request.output) < request.num_new:
                    request.tokens.append(1000 + len(request.tokens) % 97)
                else:
                    self.abort(request)
        merged = StepReport()
        for report in reports:
            merged = merged.merge(report)
        self.scheduler.read_report(merged)
        self._note_ends(results)
        self.scheduler.finish_loads(self._all_loaded(results))
        for request_id in self._all_loaded(results):
            self._finish_load(request_id, bad_blocks)

    def _all_loaded(self, results: list[tuple[set[str], set[str], set[int]]]) -> set[str]:
        done = [each for each in self.loading if all(each in self._loaded_at(rank) for rank in self._ranks)]
        return set(done)

    def _note_ends(self, results: list[tuple[set[str], set[str], set[int]]]) -> None:
        for rank, (saved, loaded, failed) in enumerate(results):
            self._loaded_at(rank).update(loaded)
            self._saved_at(rank).update(saved)
            self._bad_blocks.update(failed)
        for request_id in [*self.held]:
            if all(request_id in self._saved_at(rank) for rank in self._ranks):
                self._free_blocks(self.held.pop(request_id))

    def _loaded_at(self, rank: int) -> set[str]:
        return self.__dict__.setdefault("_loaded", {}).setdefault(rank, set())

    def _saved_at(self, rank: int) -> set[str]:
        return self.__dict__.setdefault("_saved", {}).setdefault(rank, set())

    @property
    def _bad_blocks(self) -> set[int]:
        return self.__dict__.setdefault("_bad", set())

    def _finish_load(self, request_id: str, bad_blocks: set[int]) -> None:
        request = self.loading.pop(request_id)
        for rank in self._ranks:
            self._loaded_at(rank).discard(request_id)
        bad = self._bad_blocks.intersection(request.blocks)
        self._bad_blocks.difference_update(bad)
        if request.state == "finished":
            self._free_blocks(request)
            return
        if bad:
            request.num_computed, request.num_hit = 0, 0
            self._free_blocks(request)
        else:
            request.num_computed = request.num_hit - (request.num_hit == len(request.tokens))
            request.is_loaded = True
        request.state = "waiting"
        self.waiting.insert(0, request)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for rank in self._ranks:
            close_links([self.worker_links[rank]], self._loops[1 + rank])
        self.scheduler.close()


def prompts(number: int, length: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Random prompts that begin with the same `shared` tokens."""
    rng = random.Random(seed)
    head = [rng.randrange(500) for _ in range(shared)]
    return [head + [rng.randrange(500) for _ in range(length - shared)] for _ in range(number)]
