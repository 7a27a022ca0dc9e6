"""Sessions and their leases' owners: opening, expiry, death, the wait queue and admission."""
