"""What nodes hold, one component each: the KV of all tokens, the KV of a window, recurrent states."""
