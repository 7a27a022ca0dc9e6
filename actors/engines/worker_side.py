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

import torch

from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.engines.block_copies import BlockCopies
from raydix.actors.engines.cache_link import CacheLink
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.step_messages import StepPlan, StepReport
from raydix.actors.engines.transfer_counts import TransferCounts
from raydix.actors.engines.transfers import Transfers
from raydix.actors.engines.worker_leases import Computed, WorkerLeases

_IDLE_WAIT_S = 0.002  # for a load, in a step that computes nothing


class WorkerSide:
    """The leases and copies of one rank. The engine's thread calls its methods.

    No method waits for a reply of the cache. The threads share `Transfers`; the loop thread has the leases to itself.

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
        self._rank = rank
        self._link = link
        self._loop = loop
        self._copies = copies
        self._keeps_blocks = keeps_blocks
        self._transfers = Transfers(rank, counts)
        self._leases = WorkerLeases(settings, rank, link, copies, block_size, self._transfers, counts)
        self._computed: Computed | None = None  # of this step, if it saves, until the forward pass has run
        self._bound_reported = 0

    def before_step(self, plan: StepPlan) -> None:
        """Make sure that no copy reads or writes a block that its request has lost. It waits for copies that run."""
        lost = plan.preempted | (plan.ended - plan.held.keys())
        for save in self._transfers.cancel_saves(lost if self._keeps_blocks else None):
            save.copied.wait()

    def begin_step(self, plan: StepPlan) -> None:
        """Start the loads of a step, and ask for the slots of its saves, before its forward pass."""
        loads, saves = self._transfers.begin(plan)
        computed = Computed()
        self._computed = computed if saves else None
        self._loop.call(self._leases.begin, plan, loads, saves, computed, _record_event(self._copies))

    def end_step(self, *, is_idle: bool) -> None:
        """Let the saves of the step be copied: its forward pass has run.

        Args:
            is_idle: the step has computed nothing, so that the engine can wait for a load for some milliseconds.
        """
        computed, self._computed = self._computed, None
        if computed is not None:
            computed.set_result(_record_event(self._copies))
        elif is_idle:
            self._transfers.wait_for_load(_IDLE_WAIT_S)

    def take_results(self) -> tuple[set[str], set[str], set[int]]:
        """Return the ids of requests with ended saves and with ended loads, and the blocks of failed loads. Each once.

        If an id was used again, it means the request with the load last begun under it.
        """
        return self._transfers.take_results()

    def take_report(self) -> StepReport | None:
        """Return what has changed since the last call; None: nothing."""
        report = self._transfers.take_report()
        if self._link.order_done != self._bound_reported:
            self._bound_reported = self._link.order_done
            report.bound[self._rank] = self._bound_reported
        return report if report != StepReport() else None

    def close(self) -> None:
        """Wait for the copy that runs, if any. The caller closes the link."""
        self._leases.close()


def _record_event(copies: BlockCopies) -> torch.cuda.Event | None:
    """Return an event behind all work that the GPU has been given so far; None on a CPU."""
    if not copies.on_gpu:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
