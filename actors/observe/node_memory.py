"""The memory of this node, within the limits of its control groups, and the bytes that a cache's tables take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raydix.schemas import CacheConfig
from raydix.schemas.config import TierSizes

_ROOT = Path("/")
_PAGE_BYTES, _WINDOWED_PAGE_BYTES, _ROW_BYTES, _STATE_BYTES = 12, 8, 9, 41  # the allocators' tables


@dataclass(frozen=True)
class _Version:
    """The files of a version of control groups.

    Attributes:
        limits: the files with a limit; beyond the second one of version 2, processes are slowed down until they stand.
        usage: the file with the bytes in use, those of the groups below included.
        file_cache: the counts in `memory.stat` that are part of the usage, and given back on demand.
    """

    limits: tuple[str, ...]
    usage: str
    file_cache: tuple[str, ...]


_VERSION_1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this process could still allocate, within the limits of its control groups.

    Args:
        root: of the file system.
    """
    available = _fields(root / "proc/meminfo")["MemAvailable"] * 1024
    for group, limit, version in _limits(root):
        usage, stat = _number(group / version.usage), _fields(group / "memory.stat")
        if usage is not None:
            file_cache = sum(stat.get(name, 0) for name in version.file_cache)
            available = min(available, limit - usage + file_cache)
    return available


def total_memory(root: Path = _ROOT) -> int:
    """Return the bytes of this node, or the lowest limit of this process's control groups if that is lower.

    Args:
        root: of the file system.
    """
    return min([_fields(root / "proc/meminfo")["MemTotal"] * 1024, *(limit for _, limit, _ in _limits(root))])


def _limits(root: Path) -> Iterator[tuple[Path, int, _Version]]:
    """Yield the folder of each control group with a limit, from this process's up to the root, and the limit in bytes.

    A version 1 also says the lowest limit of all groups above, those that are not mounted here included.
    """
    for folder, group, version in _groups(root):
        limits = [_number(group / name) for name in version.limits]
        if version is _VERSION_1 and group == folder:
            limits.append(_fields(group / "memory.stat").get("hierarchical_memory_limit"))
        yield from ((group, limit, version) for limit in limits if limit is not None)


def _groups(root: Path) -> Iterator[tuple[Path, Path, _Version]]:
    """Yield the folder of this process's control group, and that of each group from it up to the mounted root."""
    paths = dict(line.split(":", 2)[1:] for line in _lines(root / "proc/self/cgroup"))
    of_memory = {name: path for names, path in paths.items() for name in names.split(",")}
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        kind, options = source.partition(" ")[0], source.rpartition(" ")[2]
        is_first = kind == "cgroup" and "memory" in options.split(",")
        path = of_memory.get("memory" if is_first else "")
        if path is None or not (is_first or kind == "cgroup2"):
            continue
        top, place = map(_unescaped, mount.split(" ")[3:5])
        mounted = root / place.lstrip("/")
        # In a namespace of control groups, a process that was moved out of it has a path with "..".
        below = PurePosixPath(path)
        is_below = below.is_relative_to(top) and ".." not in below.parts
        folder = mounted / below.relative_to(top) if is_below else mounted
        for group in (folder, *folder.parents):
            yield folder, group, _VERSION_1 if is_first else _VERSION_2
            if group == mounted:
                break


def _unescaped(path: str) -> str:
    """Return a path of `mountinfo`, which has spaces and the like in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read: the kernel has no groups, or a group has ended."""
    try:
        text = os.fsdecode(path.read_bytes())  # names of folders may have any bytes
    except OSError:
        return []
    return [line for line in text.split("\n") if line]


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it has another text, such as "max", or none."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file of names and numbers, by name."""
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def table_bytes(config: CacheConfig) -> int:
    """Return the bytes of the allocators' tables, of all tiers; the trees take more as they grow."""
    pool = config.pool
    if config.kind == "slots":
        return _ROW_BYTES * (pool.num_slots // config.run_len)
    windowed = config.sliding_window_size is not None
    tiers = [TierSizes(pool.num_slots, (pool.num_swa_slots or pool.num_slots) * windowed, pool.num_state_slots)]
    if config.host is not None:
        tiers.append(config.host_sizes)
    return sum(_tables_of(tier, config.page_size) for tier in tiers)


def _tables_of(tier: TierSizes, page_size: int) -> int:
    num_pages, window_pages = tier.num_slots // page_size, tier.num_swa_slots // page_size
    windows = (_WINDOWED_PAGE_BYTES * num_pages + _PAGE_BYTES * window_pages) if window_pages else 0
    return _PAGE_BYTES * num_pages + windows + _STATE_BYTES * tier.num_state_slots
