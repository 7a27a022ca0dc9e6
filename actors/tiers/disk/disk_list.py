"""`list_disks`: which caches have records in a folder of disk tiers, of which models, and how many."""

from __future__ import annotations

import json
from typing import NamedTuple

from raydix.actors.tiers.disk.disk_errors import DiskError
from raydix.actors.tiers.disk.disk_folder import FolderFacts, list_folders, locked
from raydix.actors.tiers.disk.disk_index import DiskIndex, IndexLayout, Space
from raydix.actors.tiers.disk.record_file import stride_of
from raydix.cache_core.tiers.page_records import Kind
from raydix.schemas import CacheUnavailable


class SpaceFacts(NamedTuple):
    """Facts about a space.

    Attributes:
        space: the namespace and its models.
        num_records: by kind.
        num_bytes: that the records take; None: their sizes are not known.
    """

    space: Space
    num_records: dict[Kind, int]
    num_bytes: int | None


class DiskFacts(NamedTuple):
    """Facts about the records of one cache and layout.

    Attributes:
        folder: with its cache, its size and its user.
        layout: of the records; None: it was not read.
        spaces: None: they were not read, as a process uses them, or as they are damaged.
        fault: why they could not be read; empty: they were, or are in use.
    """

    folder: FolderFacts
    layout: IndexLayout | None = None
    spaces: tuple[SpaceFacts, ...] | None = None
    fault: str = ""


def list_disks(path: str) -> list[DiskFacts]:
    """Return the disk tiers below a path. It locks each one that is not in use while it reads its index. O(rows).

    Raises:
        CacheUnavailable: `path` cannot be read.
    """
    return [_facts_of(folder) for folder in list_folders(path)]


def _facts_of(facts: FolderFacts) -> DiskFacts:
    if facts.is_locked:
        return DiskFacts(facts)
    try:
        with locked(facts) as folder:
            if folder is None:  # a cache has just begun
                return DiskFacts(facts._replace(is_locked=True))
            return _read(facts, folder)
    except (CacheUnavailable, DiskError, OSError) as error:
        return DiskFacts(facts, fault=str(error))


def _read(facts: FolderFacts, folder: int) -> DiskFacts:
    index = DiskIndex(facts.path, None, folder=folder)
    try:
        strides = _strides_of(index.layout)
        spaces = []
        for space in index.spaces():
            numbers = index.num_records(space.number)
            is_known = all(kind in strides for kind in numbers)
            num_bytes = sum(number * strides[kind] for kind, number in numbers.items()) if is_known else None
            spaces.append(SpaceFacts(space, numbers, num_bytes))
        return DiskFacts(facts, index.layout, tuple(spaces))
    finally:
        index.close()


def _strides_of(layout: IndexLayout) -> dict[Kind, int]:
    """Return the bytes that a record of each kind takes in its file; empty: the layout does not say so."""
    try:
        return {
            kind: stride_of(num_bytes) for kind, num_bytes in json.loads(layout.description)["record_bytes"].items()
        }
    except (ValueError, LookupError, AttributeError, TypeError):
        return {}
