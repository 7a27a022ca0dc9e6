"""Raydix in vLLM: its KV connector, its tokens for routers, the shape of its KV, the size of the cache that it needs."""
