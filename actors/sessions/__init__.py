"""Sessions and their leases' owners: opening, expiry, death, the wait queue, admission and bound models."""
