"""Raydix in vLLM: its KV connector, tokens for routers, the shape of its KV, and the size of its cache."""
