"""`DiskStory`: what a cache with a disk does in a fixed order: each of its calls may fail, or end the process."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from support.tiers.disk_rig import DiskRig
from support.tiers.faulty_files import FaultyFileCalls

from raydix.cache_core.tiers.disk_spaces import Models

PROMPTS = [[1] * 16, [1] * 12 + [2] * 20, [7] * 24, [8] * 24, [9] * 24, [3] * 16]
EVERY = 10**6  # more tokens than any pool has
DISK_PAGES = 24  # fewer than the prompts have


class DiskStory:
    """Writes, loads, evictions, retirements and other models on one rig.

    It writes to a file which weights have come, and whether the disk has confirmed it, before it goes on.

    Args:
        path: of the folder.
        shape: options of the rig.
    """

    def __init__(self, path: Path, **shape: Any) -> None:
        self.path = path
        self.notes = path / "notes"
        self.shape = {"disk_pages": DISK_PAGES, "num_pages": 48} | shape

    def rig(self, calls: FaultyFileCalls | None = None) -> DiskRig:
        """A new life of the cache. It may find what the notes allow."""
        rig = DiskRig(self.path, calls=calls, **self.shape)
        notes = self.notes.read_text().split() if self.notes.exists() else []
        asked = ["", *(note[1:] for note in notes if note[0] == "?")]
        confirmed = ["", *(note[1:] for note in notes if note[0] == "!")]
        rig.weights[None] = asked[-1]
        rig.may_find[None] = set(asked[asked.index(confirmed[-1]) :])
        return rig

    def note(self, note: str) -> None:
        """Write a note, which is there whatever becomes of this process."""
        fd = os.open(self.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{note}\n".encode())
        os.close(fd)

    async def retire(self, rig: DiskRig, weights: str, models: Models | None = None) -> None:
        """Retire all, and wait until the disk has confirmed it; perhaps other models are bound then."""
        self.note(f"?{weights}")
        rig.retire(weights, None)
        if models is not None:
            rig.models = models
            rig.disk.bindings.bind()
        deletion = rig.disk.deletions.future()
        if deletion is not None:
            await rig.wait(deletion.done)
        self.note(f"!{weights}")

    async def tell(self, rig: DiskRig) -> None:
        """Do all of it. The rig must be ready."""
        await rig.twice(*PROMPTS[:3])
        rig.core.evict(EVERY)
        await rig.lengths(*PROMPTS[:3])
        for prompt in PROMPTS[3:]:  # others leave the disk
            await rig.twice(prompt)
        await self.retire(rig, "a")
        await rig.twice(PROMPTS[0], PROMPTS[3])
        rig.core.evict(EVERY)
        await rig.lengths(PROMPTS[0])
        rig.request(PROMPTS[2])
        rig.request(PROMPTS[2])  # it is being written
        await self.retire(rig, "b")
        await rig.twice(PROMPTS[1])
        await self.retire(rig, "c", ("m", None, "v2"))
        await rig.settle()
        await rig.twice(PROMPTS[2])

    async def check_successor(self) -> Counter[int]:
        """Open the folder again: no KV is wrong or stale, and the disk works as one that met nothing.

        Returns:
            How often prefixes of each length were found.
        """
        rig = self.rig()
        try:
            await rig.ready()
            await rig.check_index()
            found = Counter(await rig.lengths(*PROMPTS))
            await self.retire(rig, "end")
            await rig.settle()
            assert await rig.lengths(*PROMPTS) == [0] * len(PROMPTS)
            await rig.twice(PROMPTS[5], PROMPTS[1])
            rig.core.evict(EVERY)
            assert await rig.lengths(PROMPTS[5], PROMPTS[1]) == [16, 32]
            await rig.check_index()
            return found
        finally:
            rig.disk.close(60)
