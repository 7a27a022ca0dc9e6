"""`Transfers`: the loads and saves of one rank, and their results: all that the threads of a worker process share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from raydix.actors.engines.step_messages import LoadPlan, SavePlan, StepPlan, StepReport
from raydix.actors.engines.transfer_counts import TransferCounts

_Plan = TypeVar("_Plan", LoadPlan, SavePlan)


@dataclass(eq=False, slots=True)
class Transfer(Generic[_Plan]):
    """A load or a save.

        waiting ──> copying ──> done                    a save
        waiting ──> copying ──> confirming ──> done     a load: its bytes count if its lease was open after the copy
                       └──────> dropped                 a load: its request has ended during the copy

    A transfer that copies can fail only when its copy has ended. `Transfers` changes the state.
    """

    plan: _Plan
    state: str = "waiting"  # "done" or "failed" at the end
    copied: threading.Event = field(default_factory=threading.Event)  # its blocks are used no more

    @property
    def has_ended(self) -> bool:
        """Whether it is done or has failed."""
        return self.state in ("done", "failed")


Load = Transfer[LoadPlan]
Save = Transfer[SavePlan]
_Transfer = TypeVar("_Transfer", Load, Save)


class Transfers:
    """The loads and saves that have not ended, and the results that are not reported. One lock guards all.

    Args:
        rank: of the worker.
        counts: where to count.
    """

    def __init__(self, rank: int, counts: TransferCounts) -> None:
        self._rank = rank
        self._counts = counts
        self._lock = threading.Lock()
        self._load_ended = threading.Event()
        self._loads: dict[int, Load] = {}  # by request: loads in flight or not reported
        self._loading: dict[str, int] = {}  # the engine's id -> the request with the last load begun under it
        self._saves: list[Save] = []  # that have not ended
        self._held: dict[int, str] = {}  # ended requests with blocks that the engine holds; its ids
        self._finished_saves: set[str] = set()
        self._report = StepReport()

    # ---------------------------------------------------------------- the engine's thread

    def cancel_saves(self, requests: set[int] | None) -> list[Save]:
        """Fail the waiting saves of these requests; None: of all. Return their saves with a copy that has begun."""
        with self._lock:
            saves = [save for save in self._saves if requests is None or save.plan.request in requests]
            for save in saves:
                if save.state == "waiting":
                    self._end_save(save, "failed")
            return [save for save in saves if not save.has_ended]

    def begin(self, plan: StepPlan) -> tuple[list[Load], list[Save]]:
        """Return the loads and saves of a step, which wait. The loads of requests that have ended fail."""
        with self._lock:
            loads = [Transfer(load) for load in plan.loads]
            for load in loads:
                assert load.plan.request not in self._loads, "a request loads once at a time"
                self._loads[load.plan.request] = load
                self._loading[load.plan.request_id] = load.plan.request
            saves = [Transfer(save) for save in plan.saves]
            self._saves += saves
            self._held.update(plan.held)
            for number in plan.ended - plan.held.keys():
                if number in self._loads:
                    self._fail_load(self._loads[number])
        return loads, saves

    def wait_for_load(self, timeout_s: float) -> None:
        """Wait until a load ends, if there is one."""
        if self._loads:
            self._load_ended.wait(timeout_s)

    def take_results(self) -> tuple[set[str], set[str], set[int]]:
        """See `WorkerSide.take_results`."""
        with self._lock:
            self._load_ended.clear()
            loaded, failed = set(), set()
            for number, load in list(self._loads.items()):
                if load.has_ended:
                    del self._loads[number]
                    if load.state == "failed":
                        failed.update(load.plan.block_ids)
                    if self._loading.get(load.plan.request_id) == number:
                        del self._loading[load.plan.request_id]
                        loaded.add(load.plan.request_id)
            saved, self._finished_saves = self._finished_saves, set()
        return saved, loaded, failed

    def take_report(self) -> StepReport:
        """Return what has changed since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
        return report

    # ---------------------------------------------------------------- the loop thread

    def begin_copies(self, transfers: Sequence[_Transfer]) -> list[_Transfer]:
        """Return the transfers that still wait. They copy from now on."""
        with self._lock:
            waiting = [transfer for transfer in transfers if transfer.state == "waiting"]
            for transfer in waiting:
                transfer.state = "copying"
        return waiting

    def end_copy(self, load: Load) -> bool:
        """Note that the copy of a load has ended; return whether it is wanted: its request has not ended meanwhile."""
        load.copied.set()
        with self._lock:
            is_wanted, load.state = load.state == "copying", "confirming"
        return is_wanted

    def end_load(self, load: Load, state: str) -> bool:
        """End a load as "done" or "failed"; return False if it has ended before, with its request or otherwise."""
        with self._lock:
            if load.has_ended:
                return False
            if state == "failed":
                self._fail_load(load)
            else:
                load.state = state
                self._load_ended.set()
        return True

    def give_up_load(self, load: Load) -> None:
        """Fail a load, if it still waits."""
        with self._lock:
            if load.state == "waiting":
                self._fail_load(load)

    def end_saves(self, saves: Sequence[Save], state: str) -> None:
        """End saves that have not ended: their blocks are used no more."""
        with self._lock:
            for save in saves:
                self._end_save(save, state)

    def give_up_save(self, save: Save) -> None:
        """Fail a save, if it still waits."""
        with self._lock:
            if save.state == "waiting":
                self._end_save(save, "failed")

    def note_saved(self, number: int, num_tokens: int) -> None:
        """Report how many tokens the lease of a request has published."""
        with self._lock:
            self._report.saved.setdefault(self._rank, {})[number] = num_tokens

    def note_lost(self, number: int) -> None:
        """Report that nothing more is loaded and saved of a request."""
        with self._lock:
            self._report.failed.add(number)

    def note_end(self, number: int) -> None:
        """Report a request that has ended, if the engine holds its blocks and no save of it is left."""
        with self._lock:
            self._report_if_held(number)

    # ---------------------------------------------------------------- states; the caller holds the lock

    def _end_save(self, save: Save, state: str) -> None:
        if save.has_ended:
            return
        save.state = state
        save.copied.set()
        self._saves.remove(save)
        if state == "failed":
            self._report.refused.add(save.plan.request)
            self._counts.add("saves_refused")
        self._report_if_held(save.plan.request)

    def _report_if_held(self, number: int) -> None:
        if number in self._held and not any(save.plan.request == number for save in self._saves):
            self._finished_saves.add(self._held.pop(number))

    def _fail_load(self, load: Load) -> None:
        """Fail a load that is not reported yet; one that copies ends first."""
        if load.state in ("copying", "dropped"):
            load.state = "dropped"
        elif load.state != "failed":
            load.state = "failed"
            self._load_ended.set()
            self._report.failed.add(load.plan.request)
            self._counts.add("load_failures")
