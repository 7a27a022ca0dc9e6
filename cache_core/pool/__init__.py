"""The tensors that hold KV and states, the allocators of their pages and slots, and the checks of their content."""
