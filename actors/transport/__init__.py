"""How messages travel between a client and a cache: in the process, by Ray calls, over a Unix socket."""
