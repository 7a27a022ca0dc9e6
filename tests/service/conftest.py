"""Caches of every kind, reached in every way."""

from support.caches.cache_fixtures import access, cache, cache1, reached, scene

__all__ = ["access", "cache", "cache1", "reached", "scene"]
