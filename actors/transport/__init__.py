"""How messages travel between a client and a cache, by Ray calls or over a Unix socket; mapped memory of pools; checks.

The calls within one process are in `client`.
"""
