"""The tensors that hold KV and states, and the allocators of their pages and slots."""
