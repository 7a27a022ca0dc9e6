"""Leases over a prefix cache: `KVCache`, the table of leases, and the allocation of their slots."""
