"""Caches in a Ray cluster: start, find and stop them, place workers near them, and their settings."""
