"""`open_disk`: the disk of a cache is opened before the cache starts, so that a wrong path is an error."""

from __future__ import annotations

import logging

from raydix.actors.memory.pool_shapes import layout_below
from raydix.actors.tiers.disk.disk_errors import DiskError, FolderInUse
from raydix.actors.tiers.disk.disk_folder import PREDECESSOR_S
from raydix.actors.tiers.disk.disk_layout import disk_sizes, index_layout
from raydix.actors.tiers.disk.disk_store import DiskStore, index_room
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.schemas import CacheConfig, CacheUnavailable

logger = logging.getLogger(__name__)

_S_A_GIB_OF_INDEX = 100.0  # A new index of 40 MB took up to 1.4 s on a busy machine.


def start_seconds(config: CacheConfig) -> float:
    """Return how long the opening of a cache's disk may take: the wait for a predecessor, and a new index."""
    try:
        room = index_room(layout_below(config, disk_sizes(config)))
    except ValueError:  # `open_disk` refuses such a size
        room = 0
    return PREDECESSOR_S + _S_A_GIB_OF_INDEX * room / 2**30


def open_disk(
    config: CacheConfig, name: str, *, wait_s: float = PREDECESSOR_S, calls: FileCalls | None = None
) -> DiskStore | FolderInUse | None:
    """Open the files of a cache's disk tier, for `DiskTier`. It waits for a predecessor that still has them.

    Args:
        config: of the cache.
        name: of the cache: of its folder.
        wait_s: for a predecessor.
        calls: of the operating system.

    Returns:
        The store; or, where another process still has it, that error: the tier goes on trying. None: the cache has no
        disk tier.

    Raises:
        CacheUnavailable: the disk cannot be used, or another cache of this process uses the folder.
    """
    if config.disk is None:
        return None
    try:
        sizes = disk_sizes(config)
    except ValueError as error:
        raise CacheUnavailable(f"the disk tier cannot be made: {error}") from error
    disk = config.disk
    try:
        store = DiskStore(
            disk.path,
            name,
            layout_below(config, sizes),
            index_layout(config),
            direct_io=disk.direct_io,
            wait_s=wait_s,
            calls=calls,
        )
    except FolderInUse as error:
        if error.is_own:
            raise CacheUnavailable(
                f"the disk cannot be used: another cache of this process has {error.path}: close it first, or give "
                "each cache a disk.path of its own"
            ) from None
        logger.warning("the cache serves without its disk: %s; it goes on trying", error)
        return error
    except (DiskError, OSError) as error:
        raise CacheUnavailable(f"the disk cannot be used at {disk.path}: {error}") from error
    if others := store.folder.others_text():
        logger.warning("%s", others)
    return store
