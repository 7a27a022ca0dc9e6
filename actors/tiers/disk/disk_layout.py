"""The format and the sizes of a cache's disk tier."""

from __future__ import annotations

import hashlib
import json

from raydix.actors.memory.pool_shapes import layout_below, records_below
from raydix.actors.tiers.disk.disk_index import ROW_BYTES, IndexLayout, index_bytes
from raydix.actors.tiers.disk.disk_store import index_room
from raydix.actors.tiers.disk.record_file import stride_of
from raydix.cache_core import RecordLayout
from raydix.cache_core.tiers.page_records import KINDS, Kind
from raydix.schemas import CacheConfig
from raydix.schemas.config import TierSizes


def index_layout(config: CacheConfig) -> IndexLayout:
    """Return the format of the records of a cache's disk: caches with equal ones can read each other's records."""
    digest = config.model_copy(update={"pool": records_below(config)}).record_digest()
    parts = {
        "records": digest,
        "page_size": config.page_size,
        "kind": config.kind,
        "sliding_window_size": config.sliding_window_size,
        "bigram": config.bigram,
        "record_bytes": record_bytes(layout_below(config, TierSizes(config.page_size, config.page_size, 1))),
        "codec": "raw",
        "planes": [],
    }
    description = json.dumps(parts)
    return IndexLayout(hashlib.sha256(description.encode()).hexdigest()[:16], config.page_size, description)


def disk_sizes(config: CacheConfig) -> TierSizes:
    """Return the slots of a cache's disk tier.

    Raises:
        ValueError: its size in bytes has no room for a record of each kind.
    """
    page = config.page_size
    found = record_bytes(layout_below(config, TierSizes(page, page, 1)))
    row = index_bytes(0, page, 1)
    costs = {kind: stride_of(num_bytes) + row for kind, num_bytes in found.items()}
    if "full" in costs:
        costs["full"] += index_bytes(1, page) - ROW_BYTES
    return config.disk_sizes(*(costs.get(kind, 0) for kind in KINDS))


def disk_bytes(config: CacheConfig, sizes: TierSizes) -> int:
    """Return the bytes that a cache's disk tier of these slots reserves, with its index."""
    layout = layout_below(config, sizes)
    records = sum((number - 1) * stride_of(num_bytes) for number, num_bytes in layout.shapes if num_bytes)
    return records + index_room(layout)


def record_bytes(layout: RecordLayout) -> dict[Kind, int]:
    """Return the bytes of a record of each kind that there is."""
    sizes = zip(KINDS, (num_bytes for _, num_bytes in layout.shapes), strict=True)
    return {kind: num_bytes for kind, num_bytes in sizes if num_bytes}
