"""The demo: a workload of conversations, and its run with the cache and without."""
