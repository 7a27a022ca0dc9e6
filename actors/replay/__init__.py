"""Replays of recorded traffic: on real caches and tiers below them, and on a simulated fleet with routers; their plots."""
