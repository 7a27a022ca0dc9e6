"""The memory of this node, within the limit of its control group, and the bytes that a cache's tables take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raydix.schemas import CacheConfig
from raydix.schemas.config import TierSizes

_PAGE_BYTES, _WINDOWED_PAGE_BYTES, _ROW_BYTES, _STATE_BYTES = 12, 8, 9, 41  # the allocators' tables


def available_memory() -> int:
    """Return the bytes that this process could still allocate, within the limit of its control group."""
    available = _fields("/proc/meminfo")["MemAvailable"] * 1024
    for group, limit, usage in _limits():
        stat = _fields(str(group / "memory.stat"))
        file_cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)  # given back on demand
        available = min(available, limit - int((group / usage).read_text()) + file_cache)
    return available


def total_memory() -> int:
    """Return the bytes of this node, or the limit of this process's control group if that is lower."""
    return min([_fields("/proc/meminfo")["MemTotal"] * 1024, *(limit for _, limit, _ in _limits())])


def _limits() -> Iterator[tuple[Path, int, str]]:
    """Yield the folder of each control group with a limit, the limit in bytes, and the name of the file of its use."""
    for folder, limit, usage in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        group = Path(folder)
        if (group / limit).is_file() and (text := (group / limit).read_text().strip()).isdigit():
            yield group, int(text), usage


def _fields(path: str) -> dict[str, int]:
    """Return the first number of each line of a file of names and numbers, by name."""
    rows = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
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
