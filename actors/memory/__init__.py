"""The memory of pools: shapes, tensors and shared memory, and memory that is registered with CUDA."""
