"""Replays of recorded traffic: on real caches, with tiers, and on a simulated fleet with routers; their plots."""
