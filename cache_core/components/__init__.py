"""The data on nodes, one component each: the KV of all tokens, the KV of a window, recurrent states."""
