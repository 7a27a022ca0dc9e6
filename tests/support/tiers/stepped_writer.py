"""`SteppedWriter`: a writer of a disk without threads, of which the test makes each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter
from raydix.actors.tiers.job_threads import JobThreads


class SteppedWriter(DiskWriter):
    """Copies, writes and commits when the test says so, in the calling thread.

    Ends are reported by `deliver`, in their order, as the event loop would.

    Attributes:
        num_to_copy, num_to_write, num_to_deliver: steps that can be made.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._posts: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._steps._post = self._note_post  # type: ignore[method-assign]

    def _make_threads(self) -> JobThreads:
        return JobThreads("none", 0)

    @property
    def store(self) -> DiskStore | None:
        """The store that is open."""
        return self._steps.store

    def _note_post(self, callback: Callable[..., object], *arguments: object) -> None:
        self._posts.append((callback, arguments))

    @property
    def num_to_copy(self) -> int:
        return len(self._steps.to_copy)

    @property
    def num_to_write(self) -> int:
        return len(self._steps.to_write) if self.store is not None else 0

    @property
    def num_to_deliver(self) -> int:
        return len(self._posts)

    @property
    def has_more(self) -> bool:
        """Whether a step can be made."""
        return bool(self._steps._to_open or self.num_to_copy or self.num_to_write or self._posts)

    def open(self) -> None:
        """Open the store, if that is to be done."""
        if self._steps._to_open is not None:
            opening, self._steps._to_open = self._steps._to_open, None
            self._steps.open_store(*opening)

    def copy_step(self) -> None:
        """Copy the pages of the next write."""
        if self.num_to_copy:
            self._steps.copy_one(self._steps.to_copy.popleft())

    def write_step(self) -> None:
        """Do the next write, or other work."""
        if self.num_to_write:
            self._steps.write_one(self._steps.to_write.popleft())
            self._steps.commit_one(self._steps.to_commit.popleft())

    def deliver(self, number: int = 1) -> None:
        """Report some ends."""
        for _ in range(min(number, len(self._posts))):
            callback, arguments = self._posts.popleft()
            callback(*arguments)

    def step(self) -> bool:
        """Make the next steps of all; return whether there were any."""
        has_more = self.has_more
        self.open()
        self.copy_step()
        self.write_step()
        self.deliver(10)
        return has_more

    def close(self, timeout_s: float | None = None) -> bool:
        super().close(0.0)
        self.open()
        while self.num_to_copy or self.num_to_write:
            self.copy_step()
            self.write_step()
        self.deliver(len(self._posts))
        self.kill()
        return True

    def kill(self) -> None:
        """Lose all that is not on the disk."""
        store, self._steps.store, self._steps._to_open = self.store, None, None
        self._posts.clear()
        if store is not None:
            store.close()
