"""Caches of every kind, reached in every way; a file for each promise of the README."""

from support.caches.cache_fixtures import access, cache, cache1, reached, scene

__all__ = ["access", "cache", "cache1", "reached", "scene"]
