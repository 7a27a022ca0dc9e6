"""The prefix cache over a radix tree: match, insert, lock, evict, explain, publish events."""
