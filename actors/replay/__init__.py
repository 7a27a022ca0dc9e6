"""Replays of recorded traffic: on real caches, and on a simulated fleet with routers; their plots."""
