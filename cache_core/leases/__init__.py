"""Leases over a prefix cache.

`leased_cache` has the contract and the life cycle of leases, `kv_cache` the cache over pages that the service drives.
`lease_table` keeps the records of leases, `lease_allocator` allocates their slots, and `kv_accounting` checks that each
slot has one owner.
"""
