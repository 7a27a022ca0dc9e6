"""`WorkerLeases`: the half of a `WorkerSide` on its loop thread: leases of requests, and copies under them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.actors.client.lease import Lease
from raydix.actors.engines.block_copies import BlockCopies, PoolTarget, WrongPage
from raydix.actors.engines.cache_link import CacheLink
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.step_messages import StepPlan
from raydix.actors.engines.transfer_counts import TransferCounts
from raydix.actors.engines.transfers import Load, Save, Transfers
from raydix.schemas import CacheError, CacheUnavailable, LeaseGrant, PoolExhausted, UnknownLease

_T = TypeVar("_T")
Computed = Future[torch.cuda.Event | None]  # Its result, when the forward pass has run: the event behind it, on a GPU.

logger = logging.getLogger(__name__)

_NULL_BLOCK = 0  # stands for a block that a window has left
_CONNECT_POLL_S = 0.1
_CONFIRM_S = 0.1  # least time for the answer that the lease of a load was open after its copy


@dataclass(eq=False, slots=True)
class _Request:
    """A request with a lease that this process adopts."""

    number: int
    grant: LeaseGrant
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # order of its verbs and copies
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


@dataclass(eq=False, slots=True)
class _Copy:
    """A save with private slots: blocks [num_blocks] go to pages [num_blocks * pages_per_block]; -1: not copied."""

    save: Save
    request: _Request
    lease: Lease
    target: PoolTarget  # the pool of the pages
    blocks: NDArray[np.int64]
    pages: NDArray[np.int64]
    end: int  # tokens of the request that its lease holds then


class WorkerLeases:
    """The leases of one rank's requests, and the copies of their blocks. All but `close` runs on the loop thread.

    Args:
        transfers: the loads and saves; their states are changed here. The other arguments are those of `WorkerSide`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rank: int,
        link: CacheLink,
        copies: BlockCopies,
        block_size: int,
        transfers: Transfers,
        counts: TransferCounts,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._link = link
        self._copies = copies
        self._block_size = block_size
        self._transfers = transfers
        self._counts = counts
        self._target: PoolTarget | None = None
        self._requests: dict[int, _Request] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="raydix-copy")

    def close(self) -> None:
        """Wait for the copy that runs, if any. Any thread may call it."""
        self._copier.shutdown(wait=True, cancel_futures=True)

    def begin(
        self, plan: StepPlan, loads: list[Load], saves: list[Save], computed: Computed, event: torch.cuda.Event | None
    ) -> None:
        """Carry out the plan of a step. On a GPU, the loads are copied after `event`."""
        self._link.order(*plan.weights)
        for number, grants in plan.grants.items():
            self._requests[number] = _Request(number, grants[self._rank])
        for load in loads:
            self._start(self._load(load, event))
        if saves:
            turns = AsyncExitStack()
            # These tasks are made here, so that they queue for their requests' turns before the ends below.
            prepared = [self._start(self._prepare_save(save, turns)) for save in saves]
            self._start(self._save_all(saves, computed, prepared, turns))
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

    async def _copy_load(self, load: Load, target: PoolTarget, copy: Callable[[], None]) -> bool:
        """Load in the copy thread, unless the load was cancelled; return whether the blocks are copied and wanted.

        Raises:
            UnknownLease: the cache has ended before the copy began.
        """
        if not self._transfers.begin_copies([load]):
            return False

        def copy_from_live_pool() -> None:
            if target is not self._target:
                raise UnknownLease(f"the pool of epoch {target.epoch!r} is gone")
            copy()

        started = time.perf_counter()
        try:
            await asyncio.get_running_loop().run_in_executor(self._copier, copy_from_live_pool)
        finally:
            is_wanted = self._transfers.end_copy(load)
        self._counts.observe("load_s", time.perf_counter() - started)
        return is_wanted

    async def _load(self, load: Load, event: torch.cuda.Event | None) -> None:
        plan = load.plan
        request = self._requests[plan.request]
        timer = self._set_timer(self._transfers.give_up_load, load)
        deadline = asyncio.get_running_loop().time() + self._settings.load_timeout_ms / 1000
        try:
            async with request.turn:
                lease, target = await self._adopt(request)
                pages = _pages_of(lease, target, plan.start, len(plan.block_ids))
                blocks = np.asarray(plan.block_ids, np.int64)
                pages[np.repeat(blocks == _NULL_BLOCK, target.pages_per_block)] = -1
                copy = partial(target.load, pages, blocks, plan.stamps, event)
                if await self._copy_load(load, target, copy):
                    await self._confirm(lease, deadline)
                    if self._transfers.end_load(load, "done"):
                        self._counts.add("loads")
                        self._counts.add("loaded_bytes", len(blocks) * self._copies.block_bytes)
        except WrongPage as error:
            logger.error("request %r was about to get wrong KV, and is recomputed: %s", plan.request_id, error)
            self._lose(request)
        except CacheError as error:
            logger.debug("the load of request %r has failed: %s", plan.request_id, error)
            self._link.on_error(error)
            self._lose(request)
        finally:
            timer.cancel()
            self._transfers.end_load(load, "failed")

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

    def _set_timer(self, give_up: Callable[[_T], None], transfer: _T) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._settings.load_timeout_ms / 1000, give_up, transfer)

    async def _save_all(
        self, saves: list[Save], computed: Computed, prepared: list[asyncio.Task[_Copy | None]], turns: AsyncExitStack
    ) -> None:
        """Save the blocks of a step. Its requests send one frame for their slots, and one to publish their blocks."""
        try:
            await asyncio.wait(prepared)  # all, also if one fails: its turn is given back below
            copies = [copy for task in prepared if (copy := task.result()) is not None]
            if not copies:
                return
            event = await asyncio.wrap_future(computed)
            timers = [self._set_timer(self._transfers.give_up_save, copy.save) for copy in copies]
            copied = await self._copy_saves(copies, event)
            for timer in timers:
                timer.cancel()
            published = asyncio.gather(*(self._publish(copy) for copy in copied))
            await asyncio.sleep(0)  # the requests are queued before the engine learns that its blocks are free
            self._transfers.end_saves([copy.save for copy in copied], "done")
            await published
        finally:
            self._transfers.end_saves(saves, "failed")
            await turns.aclose()

    async def _prepare_save(self, save: Save, turns: AsyncExitStack) -> _Copy | None:
        """Return the pages of a save, in private slots; None if it cannot be saved. Take its request's turn."""
        plan = save.plan
        request = self._requests[plan.request]
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
        waiting = set(self._transfers.begin_copies([copy.save for copy in copies]))
        chosen = [copy for copy in copies if copy.save in waiting]
        copied: list[_Copy] = []

        def copy_all() -> None:
            for copy in chosen:
                started = time.perf_counter()
                try:
                    if copy.target is self._target:
                        copy.target.save(copy.blocks, copy.pages, copy.save.plan.stamps, event)
                        copied.append(copy)
                        self._counts.observe("save_s", time.perf_counter() - started)
                finally:
                    copy.save.copied.set()

        if chosen:
            await asyncio.get_running_loop().run_in_executor(self._copier, copy_all)
        return copied

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
        self._counts.add("saves")
        self._counts.add("saved_bytes", len(copy.blocks) * self._copies.block_bytes)
        self._transfers.note_saved(request.number, lease.published_len)

    def _note_failed_save(self, request: _Request, error: CacheError) -> None:
        if isinstance(error, PoolExhausted):
            logger.debug("blocks of request %d are not saved: %s", request.number, error)
            return
        logger.debug("the save of request %d has failed: %s", request.number, error)
        self._link.on_error(error)
        self._lose(request)

    def _lose(self, request: _Request) -> None:
        """Save and load nothing more of a request."""
        request.is_lost = True
        self._transfers.note_lost(request.number)

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
            self._transfers.note_end(number)

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
