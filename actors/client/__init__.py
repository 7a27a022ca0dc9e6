"""The client of a cache: its session, leases, the mapped pool, and the plain form for threads."""
