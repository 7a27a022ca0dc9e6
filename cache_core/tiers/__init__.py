"""Tiers of KV: a pool on a device, and a larger one below it that keeps the KV which leaves the device.

A tier is a cache of its own: `Tier` names a `KVCache`. A move of pages between two tiers is two leases and a copy:
`Writes` and `Loads` prepare it, and complete it once the copier has copied; `moves.py` has their rules. No node of a
tree refers to another tier. A load reads any place that is `Readable`; a `LookUp` is what a request finds in each.
`PageRecords` and `PageCopies` copy pages to records of bytes and back.

A tier on a disk has an index, with a row for each record (`IndexRow`). `RecordKeeper` keeps a record from being used
again while a row names it. After a restart, `DiskSpaces` knows which pages may be matched; `RowRuns` and `TreeBuilder`
make their tree of the rows again. `SecondUse` remembers which pages were used before.
"""
