"""How messages travel between a client and a cache, by Ray calls or over a Unix socket, and the checks of messages.

The calls within one process are in `client`.
"""
