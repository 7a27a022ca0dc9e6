"""`SteppedWriter`: a writer of a disk without threads, of which the test makes each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from raydix.actors.tiers.disk_store import DiskStore
from raydix.actors.tiers.disk_writer import DiskWriter


class SteppedWriter(DiskWriter):
    """Copies, writes and commits when the test says so, in the calling thread.

    Ends are reported by `deliver`, in their order, as the event loop would.

    Attributes:
        store: that is open; None: it is not.
        num_to_copy, num_to_write, num_to_deliver: steps that can be made.
    """

    store: DiskStore | None = None

    def _start(self, open_store: Callable[[], DiskStore], opened: Callable[[DiskStore | Exception], object]) -> None:
        self._posts: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._threads._post = self._note_post  # type: ignore[method-assign]
        self._opens: tuple[Callable[[], DiskStore], Callable[[DiskStore | Exception], object]] | None
        self._opens = open_store, opened

    def _note_post(self, callback: Callable[..., object], *arguments: object) -> None:
        self._posts.append((callback, arguments))

    @property
    def num_to_copy(self) -> int:
        return self._threads.to_copy.qsize()

    @property
    def num_to_write(self) -> int:
        return self._threads.to_write.qsize() if self.store is not None else 0

    @property
    def num_to_deliver(self) -> int:
        return len(self._posts)

    @property
    def has_more(self) -> bool:
        """Whether a step can be made."""
        return bool(self._opens or self.num_to_copy or self.num_to_write or self._posts)

    def open(self) -> None:
        """Open the store, if that is to be done."""
        if self._opens is None:
            return
        (open_store, opened), self._opens = self._opens, None
        try:
            self.store = open_store()
        except Exception as error:
            self._note_post(opened, error)
            return
        self._note_post(opened, self.store)

    def copy_step(self) -> None:
        """Copy the pages of the next write."""
        if self.num_to_copy and (write := self._threads.to_copy.get()) is not None:
            self._threads.copy_one(write)

    def write_step(self) -> None:
        """Do the next write, or other work."""
        if self.num_to_write and (item := self._threads.to_write.get()) is not None:
            assert self.store is not None
            self._threads.write_one(self.store, item)
            passed = self._threads.to_commit.get()
            assert passed is item
            self._threads.commit_one(self.store, item)

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
        super().close(timeout_s)
        self.open()
        while self.num_to_copy or self.num_to_write:
            self.copy_step()
            self.write_step()
        self.deliver(len(self._posts))
        self.kill()
        return True

    def kill(self) -> None:
        """Lose all that is not on the disk."""
        self._opens, store, self.store = None, self.store, None
        self._posts.clear()
        if store is not None:
            store.close()
