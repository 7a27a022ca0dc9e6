"""Leases over a prefix cache.

`leased_cache` has the contract and the life of a lease, `kv_cache` the cache over pages that the service drives,
`lease_table` the records of the leases, `lease_allocator` their slots, `kv_accounting` the rules of who owns them.
"""
