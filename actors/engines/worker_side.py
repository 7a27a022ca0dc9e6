"""`WorkerSide`: the half of a connector in a worker process: it owns the leases, loads pages and saves blocks.

step                      engine's thread            loop thread                      copy thread
before the step           cancel saves, or wait for
                          a copy that has begun
it begins                 hand over the plan ──────> adopt, then:
                                                     loads                     ────>  pages to blocks
                                                     confirm that the leases
                                                     are still open
                                                     extend (for the saves)
the forward pass has run  mark the blocks as whole ──────────────────────────> ────>  blocks to pages
                                                     insert
any later step            report loads, saves  <──── done
the request has ended     ─────────────────────────> release
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.actors.client.lease import Lease
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.engines.block_copies import BlockCopies, PoolTarget, WrongPage
from raydix.actors.engines.cache_link import CacheLink
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.step_messages import LoadPlan, SavePlan, StepPlan, StepReport
from raydix.actors.engines.transfer_counts import TransferCounts
from raydix.schemas import CacheError, CacheUnavailable, LeaseGrant, PoolExhausted, UnknownLease

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_NULL_BLOCK = 0  # stands for a block that a window has left
_CONNECT_POLL_S = 0.1
_IDLE_WAIT_S = 0.002  # for a load, in a step that computes nothing
_CONFIRM_S = 0.1  # least time for the answer that the lease of a load was open after its copy


@dataclass(eq=False, slots=True)
class _Transfer:
    """A load or a save.

        waiting ──> copying ──> done                    a save
        waiting ──> copying ──> confirming ──> done     a load: its bytes count if its lease was open after the copy
                       └──────> dropped                 a load whose request has ended during the copy

    A transfer that copies can fail only when its copy has ended.
    """

    request: int
    state: str = "waiting"  # at the end "done" or "failed"
    copied: threading.Event = field(default_factory=threading.Event)  # its blocks are used no more

    @property
    def has_ended(self) -> bool:
        return self.state in ("done", "failed")


@dataclass(eq=False, slots=True)
class _Request:
    """A request with a lease that this process adopts. Used on the loop thread alone."""

    number: int
    grant: LeaseGrant
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of its verbs and copies
    lease: Lease | None = None
    more: list[int] = field(default_factory=list)  # ids that the cache may not have, of the tokens from `more_at` on
    more_at: int = 0
    is_lost: bool = False

    def note_tokens(self, first: int, tokens: Sequence[int]) -> None:
        """Note the ids of the tokens from `first` on."""
        if not self.more:
            self.more_at = first
        assert self.more_at <= first <= self.more_at + len(self.more), "the engine sends the ids without a gap"
        self.more[first - self.more_at :] = tokens

    def next_tokens(self, known: int, end: int) -> list[int]:
        """Return the ids of the tokens [known, end); those before `known` are forgotten."""
        if known >= self.more_at + len(self.more):
            self.more = []
        elif known > self.more_at:
            self.more, self.more_at = self.more[known - self.more_at :], known
        return self.more[: max(0, end - known)]


class WorkerSide:
    """The leases and copies of one rank. The engine's thread calls its methods.

    No method waits for a reply of the cache.

    Args:
        settings: of the connector.
        rank: of this worker.
        link: to the cache of this rank; it runs on `loop`.
        copies: between the engine's KV caches and the pool.
        block_size: tokens of a block of the engine.
        keeps_blocks: a running request keeps all its blocks; False: it loses those that a sliding window has left.
        counts: where to count.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rank: int,
        link: CacheLink,
        loop: LoopThread,
        copies: BlockCopies,
        block_size: int,
        *,
        keeps_blocks: bool,
        counts: TransferCounts,
    ) -> None:
        self.counts = counts
        self._settings = settings
        self._rank = rank
        self._link = link
        self._loop = loop
        self._copies = copies
        self._block_size = block_size
        self._keeps_blocks = keeps_blocks
        self._target: PoolTarget | None = None  # replaced on the loop thread alone
        self._requests: dict[int, _Request] = {}  # used on the loop thread alone, as is the next
        self._tasks: set[asyncio.Task[Any]] = set()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="raydix-copy")
        self._lock = threading.Lock()  # of all below
        self._loads: dict[int, _LoadInFlight] = {}  # in flight or not reported, by request
        self._loading: dict[str, int] = {}  # by the engine's id: the request with the load last begun under it
        self._saves: list[_Transfer] = []  # that have not ended
        self._save_step: _SaveStep | None = None  # of this step, until the forward pass has run
        self._held: dict[int, str] = {}  # ended requests with blocks that the engine holds; its ids
        self._report = StepReport()
        self._finished_saves: set[str] = set()
        self._load_ended = threading.Event()
        self._bound_reported = 0

    # ---------------------------------------------------------------- the engine's thread

    def before_step(self, plan: StepPlan) -> None:
        """Make sure that no copy reads or writes a block that its request has lost. It waits for copies that run."""
        lost = plan.preempted | (plan.ended - plan.held.keys())
        running: list[_Transfer] = []
        with self._lock:
            for save in self._saves.copy():
                if save.request in lost or not self._keeps_blocks:
                    if save.state == "waiting":
                        self._end_save(save, "failed")
                    else:
                        running.append(save)
        for each in running:
            each.copied.wait()

    def begin_step(self, plan: StepPlan) -> None:
        """Start the loads of a step, and ask for the slots of its saves, before its forward pass."""
        loads: list[_LoadInFlight] = []
        with self._lock:
            for load in plan.loads:
                assert load.request not in self._loads, "a request loads once at a time"
                self._loads[load.request] = (load, _Transfer(load.request))
                self._loading[load.request_id] = load.request
                loads.append(self._loads[load.request])
            saves = [_Save(each, _Transfer(each.request)) for each in plan.saves]
            self._saves += [each.transfer for each in saves]
            self._save_step = _SaveStep(saves) if saves else None
            self._held.update(plan.held)
            for number in plan.ended - plan.held.keys():
                if number in self._loads:
                    self._fail_load(self._loads[number][1])
        self._loop.call(self._begin, plan, loads, self._save_step, _record_event(self._copies))

    def end_step(self, *, is_idle: bool) -> None:
        """Let the saves of the step be copied: its forward pass has run.

        Args:
            is_idle: the step has computed nothing, so that the engine can wait for a load for some milliseconds.
        """
        step, self._save_step = self._save_step, None
        if step is not None:
            self._loop.call(step.mark_computed, _record_event(self._copies))
        elif is_idle and self._loads:
            self._load_ended.wait(_IDLE_WAIT_S)

    def take_results(self) -> tuple[set[str], set[str], set[int]]:
        """Return the ids of requests with ended saves and with ended loads, and the blocks of failed loads. Each once.

        If an id was used again, it means the request with the load last begun under it.
        """
        with self._lock:
            self._load_ended.clear()
            loaded, failed = set(), set()
            for number, (plan, load) in list(self._loads.items()):
                if load.has_ended:
                    del self._loads[number]
                    if load.state == "failed":
                        failed.update(plan.block_ids)
                    if self._loading.get(plan.request_id) == number:
                        del self._loading[plan.request_id]
                        loaded.add(plan.request_id)
            saved, self._finished_saves = self._finished_saves, set()
        return saved, loaded, failed

    def take_report(self) -> StepReport | None:
        """Return what has changed since the last call; None: nothing."""
        with self._lock:
            report, self._report = self._report, StepReport()
        if self._link.order_done != self._bound_reported:
            self._bound_reported = self._link.order_done
            report.bound[self._rank] = self._bound_reported
        return report if report != StepReport() else None

    def close(self) -> None:
        """Wait for the copy that runs, if any. The caller closes the link."""
        self._copier.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------- states; the caller holds the lock

    def _end_save(self, save: _Transfer, state: str) -> None:
        """End a save, if it has not ended: its blocks are used no more."""
        if save.has_ended:
            return
        save.state = state
        save.copied.set()
        self._saves.remove(save)
        if state == "failed":
            self._report.refused.add(save.request)
            self.counts.add("saves_refused")
        self._report_if_held(save.request)

    def _report_if_held(self, number: int) -> None:
        """Report a request with held blocks, if no save of it is left."""
        if number in self._held and not any(save.request == number for save in self._saves):
            self._finished_saves.add(self._held.pop(number))

    def _fail_load(self, load: _Transfer) -> None:
        """Fail a load that is not reported yet; one that copies ends first."""
        if load.state in ("copying", "dropped"):
            load.state = "dropped"
        elif load.state != "failed":
            load.state = "failed"
            self._load_ended.set()
            self._report.failed.add(load.request)
            self.counts.add("load_failures")

    # ---------------------------------------------------------------- the loop thread

    def _begin(
        self, plan: StepPlan, loads: list[_LoadInFlight], saves: _SaveStep | None, event: torch.cuda.Event | None
    ) -> None:
        self._link.order(*plan.weights)
        for number, grants in plan.grants.items():
            self._requests[number] = _Request(number, grants[self._rank])
        for load, transfer in loads:
            self._start(self._load(load, transfer, event))
        if saves is not None:
            turns = AsyncExitStack()
            # These tasks are made here, so that they queue for their requests' turns before the ends below.
            prepared = [self._start(self._prepare_save(each, turns)) for each in saves.saves]
            self._start(self._save_all(saves, prepared, turns))
        for number in plan.ended:
            self._start(self._end_request(number))

    def _start(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _adopt(self, request: _Request) -> tuple[Lease, PoolTarget]:
        """Return the request's lease, which is adopted if it is not yet, and the pool of its epoch.

        Raises:
            CacheError: the lease cannot be used any more.
        """
        if request.is_lost:
            raise UnknownLease(f"the lease of request {request.number} is lost")
        if request.lease is None:
            if not self._link.connected:
                raise CacheUnavailable(f"cache {self._link.name!r} is not connected")
            request.lease = await self._link.client.adopt(request.grant)
        request.lease.check_open()
        pool = self._link.pool
        if pool is None or pool.lost or pool.epoch != request.lease.epoch:
            raise UnknownLease(f"the pool of epoch {request.lease.epoch!r} is gone")
        if self._target is None or self._target.epoch != pool.epoch:
            self._target = self._copies.attach(pool.pages, self._link.client.config.page_size, pool.epoch)
            pool.on_lost = self._drop_target
        return request.lease, self._target

    def _drop_target(self) -> None:
        """Drop the views of the pool of an ended cache. Copies to and from it that have not begun end unrun."""
        self._target = None

    async def _copy_load(self, transfer: _Transfer, target: PoolTarget, load: Callable[[], None]) -> bool:
        """Load in the copy thread, unless the transfer was cancelled; return whether the blocks are copied and wanted.

        Raises:
            UnknownLease: the cache has ended before the load began.
        """
        with self._lock:
            if transfer.state != "waiting":
                return False
            transfer.state = "copying"

        def load_from_live_pool() -> None:
            if target is not self._target:
                raise UnknownLease(f"the pool of epoch {target.epoch!r} is gone")
            load()

        started = time.perf_counter()
        try:
            await asyncio.get_running_loop().run_in_executor(self._copier, load_from_live_pool)
        finally:
            transfer.copied.set()
            with self._lock:
                is_wanted, transfer.state = transfer.state == "copying", "confirming"
        self.counts.observe("load_s", time.perf_counter() - started)
        return is_wanted

    async def _load(self, plan: LoadPlan, transfer: _Transfer, event: torch.cuda.Event | None) -> None:
        request = self._requests.get(plan.request)
        timer = self._set_timer(self._give_up_load, transfer)
        deadline = asyncio.get_running_loop().time() + self._settings.load_timeout_ms / 1000
        try:
            if request is None:
                raise CacheUnavailable(f"request {plan.request_id!r} has no lease")
            async with request.turn:
                lease, target = await self._adopt(request)
                pages = _pages_of(lease, target, plan.start, len(plan.block_ids))
                blocks = np.asarray(plan.block_ids, np.int64)
                pages[np.repeat(blocks == _NULL_BLOCK, target.pages_per_block)] = -1
                load = partial(target.load, pages, blocks, plan.stamps, event)
                if await self._copy_load(transfer, target, load):
                    await self._confirm(lease, deadline)
                    self._finish_load(transfer, len(blocks))
        except WrongPage as error:
            logger.error("request %r was about to get wrong KV, and is recomputed: %s", plan.request_id, error)
            self._lose(request)
        except CacheError as error:
            logger.debug("the load of request %r has failed: %s", plan.request_id, error)
            self._link.on_error(error)
            self._lose(request)
        finally:
            timer.cancel()
            with self._lock:
                if not transfer.has_ended:
                    self._fail_load(transfer)

    async def _confirm(self, lease: Lease, deadline: float) -> None:
        """Return if the lease of a load is open after its copy.

        This process may have stood still in the copy for longer than its session lives. Then the pages may have been
        overwritten before the copy went on, and only the cache knows of it yet.

        Args:
            deadline: time of the loop; the answer may always take `_CONFIRM_S`.

        Raises:
            CacheError: the lease has ended, or the cache does not answer.
        """
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(_CONFIRM_S, left_s)):
                await lease.confirm_open()
        except TimeoutError:
            raise CacheUnavailable(f"the cache has not confirmed that lease {lease.lease_id!r} is open") from None

    def _finish_load(self, transfer: _Transfer, num_blocks: int) -> None:
        """End a load with the right bytes, unless its request has ended meanwhile."""
        with self._lock:
            if transfer.has_ended:
                return
            transfer.state = "done"
            self._load_ended.set()
        self.counts.add("loads")
        self.counts.add("loaded_bytes", num_blocks * self._copies.block_bytes)

    def _set_timer(self, give_up: Callable[..., None], *about: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._settings.load_timeout_ms / 1000, give_up, *about)

    def _give_up_load(self, transfer: _Transfer) -> None:
        with self._lock:
            if transfer.state == "waiting":
                self._fail_load(transfer)

    def _give_up_save(self, save: _Save) -> None:
        with self._lock:
            if save.transfer.state == "waiting":
                self._end_save(save.transfer, "failed")

    async def _save_all(
        self, step: _SaveStep, prepared: list[asyncio.Task[_Copy | None]], turns: AsyncExitStack
    ) -> None:
        """Save the blocks of a step. Its requests send one frame for their slots, and one to publish their blocks."""
        try:
            await asyncio.wait(prepared)  # all, also if one fails: its turn is given back below
            copies = [copy for each in prepared if (copy := each.result()) is not None]
            if not copies:
                return
            await step.computed.wait()
            timers = [self._set_timer(self._give_up_save, each.save) for each in copies]
            copied = await self._copy_saves(copies, step.event)
            for timer in timers:
                timer.cancel()
            published = asyncio.gather(*(self._publish(each) for each in copied))
            await asyncio.sleep(0)  # the requests are queued before the engine learns that its blocks are free
            self._end_copied(copied)
            await published
        finally:
            with self._lock:
                for save in step.saves:
                    self._end_save(save.transfer, "failed")
            await turns.aclose()

    async def _prepare_save(self, save: _Save, turns: AsyncExitStack) -> _Copy | None:
        """Return the pages of a save, in private slots; None if it cannot be saved. Take its request's turn."""
        plan = save.plan
        request = self._requests.get(plan.request)
        if request is None:
            return None
        request.note_tokens(plan.first, plan.tokens)
        await turns.enter_async_context(request.turn)
        try:
            lease, target = await self._adopt(request)
            blocks = np.asarray(plan.block_ids, np.int64)
            end = plan.start + self._block_size * len(blocks)
            if lease.published_len < plan.start or not blocks.all():
                return None  # an earlier save was not carried out, or a window has left a block: the null block is 0
            if end > len(lease):
                await lease.extend(end - len(lease), timeout_s=0)
            pages = _pages_of(lease, target, plan.start, len(blocks))
            pages[: max(0, lease.published_len - plan.start) // target.page_size] = -1  # the tree's
        except CacheError as error:
            self._note_failed_save(request, error)
            return None
        return _Copy(save, request, lease, target, blocks, pages, end)

    async def _copy_saves(self, copies: list[_Copy], event: torch.cuda.Event | None) -> list[_Copy]:
        """Copy in one job of the copy thread; return the copies that were made.

        Cancelled saves are not copied, nor are those to the pool of a cache that has ended.
        """
        with self._lock:
            chosen = [each for each in copies if each.save.transfer.state == "waiting"]
            for each in chosen:
                each.save.transfer.state = "copying"

        copied: list[_Copy] = []

        def copy_all() -> None:
            for copy in chosen:
                started = time.perf_counter()
                try:
                    if copy.target is self._target:
                        copy.target.save(copy.blocks, copy.pages, copy.save.plan.stamps, event)
                        copied.append(copy)
                        self.counts.observe("save_s", time.perf_counter() - started)
                finally:
                    copy.save.transfer.copied.set()

        if chosen:
            await asyncio.get_running_loop().run_in_executor(self._copier, copy_all)
        return copied

    def _end_copied(self, copies: list[_Copy]) -> None:
        with self._lock:
            for each in copies:
                self._end_save(each.save.transfer, "done")

    async def _publish(self, copy: _Copy) -> None:
        request, lease = copy.request, copy.lease
        try:
            known = lease.known_len
            response = await lease.insert_next(copy.end, request.next_tokens(known, copy.end))
            if response.retired:
                raise UnknownLease("the weights have changed: the lease publishes nothing")
        except CacheError as error:
            self._note_failed_save(request, error)
            return
        self.counts.add("saves")
        self.counts.add("saved_bytes", len(copy.blocks) * self._copies.block_bytes)
        with self._lock:
            self._report.saved.setdefault(self._rank, {})[request.number] = lease.published_len

    def _note_failed_save(self, request: _Request, error: CacheError) -> None:
        if isinstance(error, PoolExhausted):
            logger.debug("blocks of request %d are not saved: %s", request.number, error)
            return
        logger.debug("the save of request %d has failed: %s", request.number, error)
        self._link.on_error(error)
        self._lose(request)

    def _lose(self, request: _Request | None) -> None:
        """Save and load nothing more of a request."""
        if request is not None:
            request.is_lost = True
            with self._lock:
                self._report.failed.add(request.number)

    async def _end_request(self, number: int) -> None:
        request = self._requests.pop(number, None)
        try:
            if request is not None:
                async with request.turn:
                    if request.lease is not None:
                        await request.lease.release()
                    else:
                        self._start(self._end_unadopted(request))
        except CacheError as error:
            logger.debug("the lease of request %d has ended by itself: %s", number, error)
        finally:
            with self._lock:
                self._report_if_held(number)

    async def _end_unadopted(self, request: _Request) -> None:
        """End a lease that no load or save could adopt, as soon as the cache is connected: else its grant holds it.

        The scheduler may connect to a restarted cache, and grant leases there, before this process connects.
        """
        while not self._link.connected:  # noqa: ASYNC110 -- the link has no event, and this is rare
            await asyncio.sleep(_CONNECT_POLL_S)
        try:
            lease = await self._link.client.adopt(request.grant)
            await lease.release()
        except CacheError as error:
            logger.debug("the lease of request %d has ended by itself: %s", request.number, error)


@dataclass(eq=False, slots=True)
class _Save:
    """A save of the present step or an earlier one."""

    plan: SavePlan
    transfer: _Transfer


@dataclass(eq=False, slots=True)
class _SaveStep:
    """The saves of one step, which are carried out together."""

    saves: list[_Save]
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # the forward pass has run
    event: torch.cuda.Event | None = None  # of the forward pass, on a GPU

    def mark_computed(self, event: torch.cuda.Event | None) -> None:
        """Let the blocks be copied. Call it on the loop."""
        self.event = event
        self.computed.set()


@dataclass(eq=False, slots=True)
class _Copy:
    """A save with private slots: blocks [num_blocks] go to pages [num_blocks * pages_per_block]; -1: not copied."""

    save: _Save
    request: _Request
    lease: Lease
    target: PoolTarget  # with the pool that the pages are of
    blocks: NDArray[np.int64]
    pages: NDArray[np.int64]
    end: int  # tokens of the request that its lease holds then


_LoadInFlight = tuple[LoadPlan, _Transfer]


def _pages_of(lease: Lease, target: PoolTarget, start: int, num_blocks: int) -> NDArray[np.int64]:
    """Return the lease's pages of the blocks from token `start` on.

    Raises:
        UnknownLease: the lease covers fewer tokens.
    """
    first, step = start // target.page_size, target.pages_per_block
    pages: NDArray[np.int64] = lease.pages[first : first + num_blocks * step].numpy()
    if len(pages) != num_blocks * step:
        raise UnknownLease("the lease covers fewer tokens than the plan")
    return pages.copy()


def _record_event(copies: BlockCopies) -> torch.cuda.Event | None:
    """Return an event behind all work that the GPU has been given so far; None on a CPU."""
    if not copies.on_gpu:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
