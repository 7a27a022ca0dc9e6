"""The figures of a disk tier: copies, the cost to requests, restarts, and many spaces."""

from __future__ import annotations

import tempfile

from benchmarks import bench_disk, disk_spaces, disk_speed
from benchmarks.figures import Figure


def figures(quick: bool) -> list[Figure]:
    """Return all figures of a disk tier, if the temporary folder has O_DIRECT."""
    if bench_disk.has_direct_io():
        spaces = disk_spaces.figures(3_000 if quick else 30_000)
        return [*bench_disk.figures(quick), *disk_speed.figures(quick), *spaces]
    print(f"disk: not measured, as {tempfile.gettempdir()} has no O_DIRECT: let TMPDIR name another folder", flush=True)
    return []
